"""The task's code runs in worker processes, which are killed with all their children when it misbehaves.

    generator ─▶ guard ─▶ template ─▶ workers
    (pool.py)    kills    imports     run the task's code
                 and      the task,
                 reaps    is forked

The guard runs none of the task's code, and every process below it that loses its parent becomes its child.
So no process is beyond its reach, and it outlives the generator for as long as it takes to kill them all.
"""
