"""Small tasks at a terminal, generated: find, count, extract, rename, fix. The environment `terminal_tasks`."""
