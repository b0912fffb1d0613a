"""`fxmem serve`: the page of a step, live on this machine alone, with the settings to change.

Starlette answers, uvicorn listens on 127.0.0.1. Each analysis runs in a process of its own, so that a saved file is
read anew and nothing of it stays; its page is kept in memory by settings and by the state of the files.
"""
