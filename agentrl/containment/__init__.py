"""What keeps strangers' code in bounds: deadlines, threads, processes and the loop it runs in, and the one sandbox."""
