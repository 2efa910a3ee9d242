"""What a run wrote, and what it says.

history/     reads and writes a run's folder          loggers/     metrics.jsonl, TensorBoard, W&B
diagnosis/   rules that find what is wrong            report/      a page about a run, or several
"""
