"""What a run needs of memory, disk and time, what the machine has, and whether it fits."""
