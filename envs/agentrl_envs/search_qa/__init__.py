"""Questions answered by searching: the environment `search_qa`."""
