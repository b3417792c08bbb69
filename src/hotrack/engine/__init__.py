"""Scheduler, step plans, model runner, sampler, rank processes, offline LLM. Importing this package loads no
torch."""
