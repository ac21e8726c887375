"""A reward as users of verl write it for `custom_reward_function`: GSM8K's answers behind `####`."""

import re


def extract_solution(solution_str, method="strict"):
    pattern = r"#### (\-?[0-9\.\,]+)" if method == "strict" else r"(\-?[0-9\.\,]+)"
    found = re.findall(pattern, solution_str[-300:])
    return found[-1].replace(",", "").rstrip(".") if found else None


def compute_score(data_source, solution_str, ground_truth, extra_info=None, format_score=0.0, **kwargs):
    if data_source != "openai/gsm8k":
        raise NotImplementedError(f"Reward function is not implemented for {data_source=}")
    answer = extract_solution(solution_str)
    if answer is None:
        return {"score": 0.0, "acc": False, "pred": "", "index": extra_info["index"]}
    is_right = answer == ground_truth
    score = 1.0 if is_right else format_score
    return {"score": score, "acc": is_right, "pred": answer, "index": extra_info["index"]}


async def compute_score_later(data_source, solution_str, ground_truth, extra_info):
    return compute_score(data_source, solution_str, ground_truth, extra_info)["score"]


def compute_score_of_shipped_form(solution_str, ground_truth, method="strict", format_score=0.0, score=1.0):
    """The form of the functions in verl's own `reward_score` folder."""
    answer = extract_solution(solution_str, method)
    return 0 if answer is None else score if answer == ground_truth else format_score


def compute_score_of_geometry(predict_str, ground_truth, use_boxed=True):
    return float((rf"\boxed{{{ground_truth}}}" if use_boxed else ground_truth) in predict_str)


def compute_score_batch(data_sources, solution_strs, ground_truths, extra_infos):
    """The form of `reward_model.reward_manager=batch`."""
    return [
        compute_score(data_source, solution_str, ground_truth, extra_info)
        for data_source, solution_str, ground_truth, extra_info in zip(
            data_sources, solution_strs, ground_truths, extra_infos, strict=True
        )
    ]
