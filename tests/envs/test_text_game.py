"""The game of `text_game`: its maps, what a move does and is worth, what is held out, what is demonstrated."""

from itertools import product
from random import Random

import pytest
from agentrl_envs.text_game.environment import TextGame
from agentrl_envs.text_game.game import Game, compass, drawn
from agentrl_envs.text_game.maps import is_held_out, make_map
from agentrl_envs.text_game.world import Direction, World

from agentrl.errors import UserError

MAP = """\
#######
#.K#..#
#@.D.G#
#######"""
NORTH, SOUTH, EAST, WEST = Direction


def game(view=compass, slack=2.0, drawing=MAP):
    return Game.begin(World.read(drawing), view, slack)


def test_a_map_reads_as_it_is_drawn():
    world = World.read(MAP)
    assert world.draw() == MAP
    assert (world.start, world.key, world.door, world.goal) == ((1, 2), (2, 1), (3, 2), (5, 2))
    assert world.door in world.floor
    assert (world.width, world.height) == (7, 4)


@pytest.mark.parametrize(("mark", "instead", "count"), [("K", ".", 0), (".G", "GG", 2), ("@", "#", 0)])
def test_a_map_with_a_mark_too_few_or_too_many_is_refused(mark, instead, count):
    with pytest.raises(ValueError, match=f"this one has {count}"):
        World.read(MAP.replace(mark, instead, 1))


def shortest_by_trying(world):
    """Breadth first from the start, by nothing but the rules: an answer to compare `distances` with."""
    places, moves = {(world.start, False)}, 0
    while places and all(cell != world.goal for cell, _ in places):
        places = {after for place in places for _, after in world.moves(place)}
        moves += 1
        assert moves < 100
    return moves


def test_distances_are_those_of_a_search_from_the_start():
    worlds = [make_map(split, i) for split, i in product(("train", "test", "large"), range(40))]
    assert all(w.distances()[w.start, False] == shortest_by_trying(w) for w in worlds)


def test_a_map_without_its_key_cannot_be_solved():
    for index in range(40):
        world = make_map("train", index)
        reached, new = set(), {(world.start, True)}
        while new:
            reached |= new
            new = {
                (after[0], True)
                for cell, _ in new
                for _, after in world.moves((cell, True))
                if after[0] != world.door and (after[0], True) not in reached
            }
        assert (world.goal, True) not in reached
        assert (world.key, True) in reached


def test_what_a_game_says_and_is_worth():
    g = game()
    assert (g.shortest, g.limit) == (6, 13)
    assert compass(g) == "Key: 1 north, 1 east. Open: north, east."
    said = [g.move(d) for d in (SOUTH, EAST, EAST, NORTH, SOUTH, EAST, EAST)]
    assert [o.text for o in said] == [
        "There is a wall. Key: 1 north, 1 east. Open: north, east.",
        "Key: 1 north. Open: north, west.",
        "The door is locked. Key: 1 north. Open: north, west.",
        "You have the key. Door: 1 south, 1 east. Open: south, west.",
        "Door: 1 east. Open: north, east, west.",
        "The door opens. Goal: 2 east. Open: east, west.",
        "Goal: 1 east. Open: north, east, west.",
    ]
    assert [o.legal for o in said] == [False, True, False, True, True, True, True]
    last = g.move(EAST)
    assert (last.text, last.over, g.won, g.used) == ("You reach the goal.", True, True, 8)
    assert sum(o.progress for o in [*said, last]) == pytest.approx(1)
    after = g.move(WEST)
    assert (after.text, after.progress, after.over, g.used) == ("The game is over.", 0.0, True, 8)
    assert g.waste("why").over
    assert g.used == 8


def test_walking_back_and_forth_earns_nothing():
    g = game(slack=50)
    earned = [g.move(direction).progress for _ in range(20) for direction in (EAST, WEST)]
    assert max(earned) > 0
    assert sum(earned) == pytest.approx(0)


def test_step_rewards_add_up_to_the_progress_made_and_never_to_more_than_one():
    for index in range(60):
        g, rng = Game.begin(make_map("train", index), compass, 6.0), Random(index)
        outcomes = []
        while not g.over:
            outcomes.append(g.move(rng.choice(list(Direction))))
        total = sum(o.progress for o in outcomes)
        assert total == pytest.approx(1 - g.left / g.shortest)
        assert total <= 1 + 1e-9
        assert (g.left == 0) == g.won


def test_a_game_ends_when_its_turns_are_used_up_and_says_so():
    g = game(slack=1.0)
    said = [g.waste("Call move.") for _ in range(g.limit)]
    assert said[0].text == f"Call move. {compass(g)}"
    assert said[-1].text == "Call move. No moves are left."
    assert [o.over for o in said] == [False] * 6 + [True]
    assert not g.won


def test_the_drawn_view_follows_the_player():
    g = game(drawn)
    assert g.move(NORTH).text == "#######\n#@K#..#\n#..D.G#\n#######"
    assert g.move(EAST).text == "You have the key.\n#######\n#.@#..#\n#..D.G#\n#######"
    assert [g.move(d).text for d in (SOUTH, EAST, EAST)][-1] == "#######\n#..#..#\n#...@G#\n#######"


@pytest.mark.slow
def test_no_held_out_map_is_ever_trained_on():
    env = TextGame()
    sides = {split: [World.read(t.data["map"]) for t in env.tasks(split)[:150]] for split in ("train", "test", "large")}
    assert not any(is_held_out(w) for w in sides["train"])
    assert all(is_held_out(w) for w in sides["test"])
    train, test = ({w.draw() for w in sides[split]} for split in ("train", "test"))
    assert not train & test
    assert len({t.data["map"] for t in env.tasks("train")[:500]}) > 450
    assert min(w.width * w.height for w in sides["large"]) > max(w.width * w.height for w in sides["train"])
    assert max(w.distances()[w.start, False] for w in sides["train"]) <= 10


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"view": "compas"}, "no view 'compas'.*compass"),
        ({"slack": 0.5}, "below 1 no game can be won"),
    ],
)
def test_wrong_arguments_are_one_clear_line(args, message):
    with pytest.raises(UserError, match=message):
        TextGame(**args)


def played_again(env, task, messages):
    """The outcomes of a demonstration's turns, played anew: each must be what the demonstration says it was."""
    g = env.game(task)
    for said, answer in zip(messages[::2], messages[1::2], strict=True):
        if calls := said.get("tool_calls"):
            outcome = g.move(Direction(calls[0]["function"]["arguments"]["to"]))
        else:
            outcome = g.waste("Call move.")
        assert answer["content"] == outcome.text
        assert answer["role"] == ("tool" if calls else "user")
    assert g.over
    return g


def test_clean_demonstrations_take_a_shortest_way():
    env = TextGame()
    for task in [*env.tasks("train")[:50], *env.tasks("large")[:10]]:
        g = played_again(env, task, env.demonstrate(task, Random(1), "clean"))
        assert g.won
        assert g.used == task.data["shortest"]


def test_careless_demonstrations_go_wrong_in_every_way_and_sometimes_arrive():
    env = TextGame()
    tasks = env.tasks("train")[:80]
    shown = [env.demonstrate(task, Random(i), "careless") for i, task in enumerate(tasks)]
    games = [played_again(env, task, messages) for task, messages in zip(tasks, shown, strict=True)]
    assert 0.2 < sum(g.won for g in games) / len(games) < 0.8
    text = "\n".join(str(m["content"]) for messages in shown for m in messages)
    assert all(part in text for part in ("There is a wall.", "Call move.", "The door is locked.", "No moves are left."))
    assert shown[0] == env.demonstrate(tasks[0], Random(0), "careless")
