"""One half of a run alone: rollouts without an update, and what is done with stored ones without sampling anew."""
