"""Reads, records and evaluates what a run writes into its folder.

history/     reads and writes a run's folder          loggers/     metrics.jsonl, TensorBoard, W&B
diagnosis/   rules that find what is wrong            report/      a page about a run, or several
"""
