"""The supervisor: brings a run back after a crash, a hang or a time limit, and keeps a history of its attempts."""
