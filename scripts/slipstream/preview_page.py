"""The preview of a run on a terminal."""

from collections.abc import Sequence
from typing import Any

from rich.console import Console, Group
from rich.padding import Padding
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from slipstream.preview_play import PreviewGroup, PreviewSample, split_runs
from slipstream.preview_report import PreviewReport

SHOWN = 3000
"""Characters of a text that are shown; the middle of a longer one is left out."""
WIDTH = 110
STYLES = {"special": "bold cyan", "sampled": "green", "prompt": ""}


class PreviewPage:
    """Prints a preview."""

    def __init__(self, tokenizer: Any, console: Console | None = None) -> None:
        found = console or Console(highlight=False)
        self._console = found if found.is_terminal else Console(file=found.file, highlight=False, width=WIDTH)
        self._tokenizer = tokenizer
        self._special = {*tokenizer.all_special_ids, *getattr(tokenizer, "added_tokens_decoder", {})}

    def print_group(self, found: PreviewGroup, number: int, total: int) -> None:
        """Prints a prompt as the model sees it, and each reply with its reward."""
        title = f" {number} of {total} · {found.source} · prompt {found.index:,} "
        length = f" {len(found.prompt):,} tokens " if found.prompt else ""
        parts: list[Any] = []
        if found.prompt:
            parts.append(self.render_tokens(found.prompt, [False] * len(found.prompt)))
        if found.answer is not None:
            parts.append(Text.assemble(("right answer  ", "dim"), shorten(found.answer, 400)))
        parts += [self._render_sample(sample, found) for sample in found.samples]
        for tokens in found.unscored:
            reply = self.render_tokens(tokens, [True] * len(tokens))
            parts.append(Padding(Group(reply, Text("not scored", "red")), (1, 0, 0, 2)))
        if found.error:
            parts.append(Text.assemble(("failed  ", "bold red"), shorten(found.error, 1500)))
        if found.rejection:
            words = f"rejected  by {found.rejection}: the rewards are {join_rewards(found.samples)}"
            parts.append(Text(words, "yellow"))
        style = "red" if found.error else "yellow" if found.rejection else "dim"
        self._console.print(
            Panel(
                Group(*parts) if parts else "nothing to show",
                title=Text(title),
                title_align="left",
                subtitle=Text(length),
                subtitle_align="right",
                border_style=style,
            )
        )

    def _render_sample(self, sample: PreviewSample, found: PreviewGroup) -> Any:
        """Returns a reply as the engine has sampled it, and under it its reward."""
        begin = len(found.prompt) if sample.tokens[: len(found.prompt)] == found.prompt else 0
        replied = self.render_tokens(sample.tokens[begin:], sample.sampled[begin:])
        line = Text(f"reward {sample.reward:g}", "bold green" if sample.reward > 0 else "bold")
        parts = [f"{name} {value:g}" for name, value in sample.components.items()]
        took = sum(sample.seconds.values())
        words = [f"{sample.num_sampled:,} tokens", sample.stop, *parts]
        if sample.seconds:
            words.append(f"scored in {took * 1000:,.0f} ms")
        line.append(f"  {' · '.join(words)}", "yellow" if sample.stop == "max_tokens" else "dim")
        return Padding(Group(replied if replied.plain else Text("(empty)", "dim"), line), (1, 0, 0, 2))

    def render_tokens(self, tokens: Sequence[int], sampled: Sequence[bool]) -> Text:
        """Returns the text of tokens, in which special tokens and sampled ones are told apart."""
        kinds = [
            "special" if token in self._special else "sampled" if is_sampled else "prompt"
            for token, is_sampled in zip(tokens, sampled, strict=True)
        ]
        text = Text(overflow="fold")
        for kind, run in split_runs(tokens, kinds):
            text.append(self._tokenizer.decode(run, skip_special_tokens=False), STYLES[kind])
        if len(text) <= SHOWN:
            return text
        left_out = len(text) - SHOWN
        middle = Text(f"\n… {left_out:,} characters …\n", "dim")
        return text[: SHOWN // 2] + middle + text[-SHOWN // 2 :]

    def print_report(self, report: PreviewReport) -> None:
        """Prints what the first steps would train, what would be rejected, and what to look at."""
        table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 3, 0, 0))
        table.add_column("source")
        for title in ("prompts", "share", "first step"):
            table.add_column(title, justify="right")
        for source in report.sources:
            size = "no end" if source.size is None else f"{source.size:,}"
            groups = f"{source.first_step:,} of {report.groups_per_step:,}"
            table.add_row(source.name, size, f"{source.share:.1%}", groups)
        self._console.print(Padding(table, (1, 0, 0, 0)))
        for name, words in report.lines.items():
            self._console.print(Text.assemble((f"{name:<14}", "bold"), words), soft_wrap=True)
        if report.rejected:
            self._console.print(Text("would be rejected", "bold yellow"))
        for words in report.rejected:
            self._console.print(Padding(Text(words), (0, 0, 0, 2)))
        if not report.rejected:
            self._console.print(Text.assemble(("would be rejected ", "bold"), "nothing that was shown"))
        for words in report.notes:
            self._console.print(Text.assemble(("note: ", "yellow"), words))


def shorten(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most // 2]} … {text[-most // 2 :]}"


def join_rewards(samples: Sequence[PreviewSample]) -> str:
    return ", ".join(f"{sample.reward:g}" for sample in samples)
