"""A game of rooms, told in words: find the key, open the door, reach the goal. The environment `text_game`."""
