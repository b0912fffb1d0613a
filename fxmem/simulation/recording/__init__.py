"""The one recording: operators watched, compiled code and FLOPs among them, and a profile built."""
