"""The tools of `fxmem mcp`: what a coding agent may ask, and the commands that answer.

The official `mcp` package speaks the protocol over stdin and stdout. Each question is a command line of fxmem in a
process of its own, in the folder that the server was started for; reports stay in a folder of the server's.
"""
