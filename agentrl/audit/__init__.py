"""`agentrl audit`: what is wrong with an environment, seen before money is spent on it."""
