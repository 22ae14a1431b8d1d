"""`pagewire demo`: prompts served across processes, compared with the model's own output.

Imports `scheduler_adapters.service` and `.hf`. Start reading at `demo.py`.
"""
