"""Trackers: programs beside a run's folder that show its metrics, evaluations and samples.

    driver ──── TensorBoard, in the driver
      │  queue, one thread each; orders and answers over a socket
      └──▶ keeper ──▶ host: one tracker (wandb, mlflow, trackio, your own) ──▶ whatever its library starts
           kills and reaps all below it

A library may hang, install signal handlers, or take seconds to import. So each tracker but TensorBoard has a
process of its own, which is killed with all its children when a call of it fails or lasts too long. The run
goes on without it.
"""
