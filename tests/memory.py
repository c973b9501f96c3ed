"""What a process holds of memory, for tests of growth."""
import psutil


def allocated() -> int:
    """Bytes of this process's writable memory. What is resident depends on the system too, which may take pages away
    and give them back between two looks."""
    told = psutil.Process().memory_info()
    return getattr(told, "data", told.rss)
