"""`pagewire top`: every page, whose it is and why it went, in a terminal or a browser, live or from a recording.

Imports `kvcache.watch`, `transfer.wire`, the values of `kvcache`, the values of `scheduler_adapters` and the values of
`pagewire`. Start reading at `view.py`, the state that keys and looks change, and `pagemap.py`, what of it becomes
colours; `app.py` draws it.
"""
