"""A device with streams on a CPU: queues that run as late, as early and as interleaved as waits allow."""
