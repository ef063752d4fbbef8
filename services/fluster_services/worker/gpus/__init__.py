"""The GPUs of this machine: what they are, how they are, and who uses them. README.md tells how they are read."""
