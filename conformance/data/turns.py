"""Reads rollouts of several turns: who wrote which tokens, what turns and tokens earn, and trees of branches.

A turn of a response names its role and its tokens, and may earn a reward, which its last token gets::

    "turns": [{"role": "assistant", "start": 0, "end": 5, "reward": 0.25}, {"role": "tool", "start": 5, "end": 9}, ...]

Only an assistant's tokens are trained on. ``token_rewards`` has one number for each token of the response. Responses
that share their beginning may be given as a tree: a record has ``branches`` instead of ``completion_ids``, and each
branch has ``completion_ids``, ``logprobs``, and either a ``reward`` or further ``branches``. Each path from the prompt
to a leaf is a response, so tokens that several paths share are in each of them.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from conformance.core.errors import UsageError, shown
from conformance.data.samples import Place, Record

ROLES = ("assistant", "tool", "observation", "user", "system")
LARGEST_REWARD = 1e6
DEEPEST = 64  # branches on a path


def flattened(record: Record, place: Place) -> Iterator[tuple[Place, Record]]:
    """Yields the responses of a record: the record itself, or a record for each path of its branches.

    Raises UsageError, which names the branch, for a tree that has no such paths.
    """
    if "branches" not in record:
        yield place, record
        return
    common = {name: value for name, value in record.items() if name != "branches"}
    yield from _paths(record, common, place, depth=0)


def _paths(node: Record, before: Record, place: Place, *, depth: int) -> Iterator[tuple[Place, Record]]:
    branches = node["branches"]
    if not isinstance(branches, list) or not branches or not all(isinstance(one, dict) for one in branches):
        raise UsageError(f"{place}: 'branches' must be a list of objects, got {shown(branches)}")
    if depth == DEEPEST:
        raise UsageError(f"{place}: more than {DEEPEST} branches follow each other; give the paths as responses")
    for number, branch in enumerate(branches, start=1):
        where, path = f"{place}, branch {number}", dict(before)
        for name in ("completion_ids", "logprobs", "completion_mask", "token_rewards"):
            part = branch.get(name)
            if part is None and name not in before and name not in ("completion_ids", "logprobs"):
                continue
            if not isinstance(part, list):
                raise UsageError(f"{where}: {name!r} must be a list, as in the other branches, got {shown(part)}")
            path[name] = [*before.get(name, []), *part]
        if ("reward" in branch) == ("branches" in branch):
            raise UsageError(f"{where}: give 'reward' to the last branch of a path, or 'branches', not both")
        if "reward" in branch:
            yield where, {**path, "reward": branch["reward"]}
        else:
            yield from _paths(branch, path, where, depth=depth + 1)


def has_given(record: Record) -> bool:
    """Tells whether turns or tokens of a response earn something besides its reward."""
    turns = record.get("turns")
    earned = isinstance(turns, list) and any(isinstance(one, dict) and one.get("reward") is not None for one in turns)
    return earned or record.get("token_rewards") is not None


def written_by_policy(record: Record, place: Place, length: int) -> list[bool]:
    """Returns whether the policy has written each of the ``length`` tokens of a response; all without turns."""
    turns = record.get("turns")
    if turns is None:
        return [True] * length
    written: list[bool] = []
    for number, turn in enumerate(_turns(turns, place), start=1):
        where, start, end = f"{place}, turn {number} of 'turns'", turn.get("start"), turn.get("end")
        if turn.get("role") not in ROLES:
            raise UsageError(f"{where}: the role must be one of {', '.join(ROLES)}, got {shown(turn.get('role'))}")
        if type(start) is not int or type(end) is not int:
            raise UsageError(f"{where}: 'start' and 'end' must be numbers of tokens, got {shown([start, end])}")
        if end <= start:
            raise UsageError(f"{where}: the turn is empty: it starts at token {start} and ends at {end}")
        if start != len(written):
            how = (
                "overlaps the turn before, which ends"
                if start < len(written)
                else "leaves out tokens: the turn before ends"
            )
            raise UsageError(f"{where}: it starts at token {start} and {how} at {len(written)}")
        written += [turn["role"] == "assistant"] * (end - start)
    if len(written) != length:
        raise UsageError(f"{place}: the turns end at token {len(written)}, and 'completion_ids' has {length} tokens")
    return written


def _turns(turns: Any, place: Place) -> Sequence[Mapping[str, Any]]:
    if not isinstance(turns, list) or not all(isinstance(one, dict) for one in turns):
        raise UsageError(f"{place}: 'turns' must be a list of objects with role, start and end, got {shown(turns)}")
    return turns


def given_rewards(record: Record, place: Place, trained: Sequence[bool]) -> list[float]:
    """Returns what each token of a response earns besides the reward of the response."""
    given = [0.0] * len(trained)
    numbers = record.get("token_rewards")
    if numbers is not None:
        if not isinstance(numbers, list) or len(numbers) != len(trained) or not all(map(_is_reward, numbers)):
            raise UsageError(f"{place}: 'token_rewards' must be a list of {len(trained)} numbers, got {shown(numbers)}")
        if wrong := next((i for i, number in enumerate(numbers) if number and not trained[i]), None):
            raise UsageError(f"{place}: token {wrong} has a number in 'token_rewards', but is not trained on")
        given = [float(number) for number in numbers]
    for number, turn in enumerate(record.get("turns") or [], start=1):
        reward, where = turn.get("reward"), f"{place}, turn {number} of 'turns'"
        if reward is None:
            continue
        if not _is_reward(reward):
            raise UsageError(f"{where}: 'reward' must be a number between -1e6 and 1e6, got {shown(reward)}")
        last = next((i for i in range(turn["end"] - 1, turn["start"] - 1, -1) if trained[i]), None)
        if last is None:
            raise UsageError(f"{where}: it earns a reward, but none of its tokens is trained on")
        given[last] += reward
    return given


def _is_reward(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) <= LARGEST_REWARD
