"""The task's code runs in worker processes, which are killed with all their children when it misbehaves.

    generator ─▶ keeper ─▶ guard ─▶ template ─▶ workers
    (pool.py)    kills     kills    imports     run the task's code
                 what a    and      the task,
                 guard     reaps    is forked
                 leaves

The guard runs none of the task's code, and every process below it that loses its parent becomes its child.
So no process is beyond its reach, and it outlives the generator for as long as it takes to kill them all.
When the guard itself is killed, the keeper inherits them in the same way.
"""
