"""Reads rollouts, the responses that a policy has sampled with their rewards, from users' files.

The samples are frozen, so a difference between two backends cannot come from sampling. A line of a JSONL file, or a
record of a Parquet file or of a Hugging Face dataset on disk, is one response::

    {"group": 3, "prompt_ids": [1, 4, ...], "completion_ids": [17, ..., 2], "logprobs": [-1.2, ...], "reward": 0.5}

Responses to one prompt have the same ``group`` and are on consecutive lines. ``logprobs`` are the log-probs of the
inference engine that sampled the response, at the objective's temperature. A response may be empty, and a truncated
response has no end-of-sequence token. Masks (conformance.data.samples) name the tokens that the policy did not
sample, such as the answers of tools. These are in the context, and in no sum, mean or advantage. The reward is that of
the last sampled token; ``discount_over`` of the objective says how discounts pass over the others. If the objective
replays the sampler's masks, a response has ``sampling_mask``, as vLLM gives it: the tokens that were kept for token i
of the response are those of ``token_ids`` from number ``offsets[i]`` to ``offsets[i + 1]``.

A turn of a response names its role and its tokens, and may earn a reward, which its last token gets::

    "turns": [{"role": "assistant", "start": 0, "end": 5, "reward": 0.25}, {"role": "tool", "start": 5, "end": 9}, ...]

Only an assistant's tokens are trained on. ``token_rewards`` has one number for each token of the response. Responses
that share their beginning may be given as a tree: a record has ``branches`` instead of ``completion_ids``, and each
branch has ``completion_ids``, ``logprobs``, and either a ``reward`` or further ``branches``. Each path from the prompt
to a leaf is a response, so tokens that several paths share are in each of them.
"""

import random
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import cycle, groupby, pairwise
from pathlib import Path
from typing import Any, TypeGuard

from conformance.core.errors import UsageError, first_few, shown
from conformance.core.host import resolve
from conformance.core.io import MIB
from conformance.data.forms import unused_columns, warn_once
from conformance.data.samples import ROLLOUT_COLUMNS, Place, Record, is_builtin, read_dataset, trained_tokens
from conformance.models.synthetic import random_model
from conformance.oracle.objectives import functions_of
from conformance.oracle.policy_gradient import ResponseFunctions
from conformance.oracle.role_model import decoder_of
from conformance.spec.batch import GIVEN, KEPT, Batch, Column, Document, Row, with_rollouts
from conformance.spec.objectives import Grpo, PolicyGradient
from conformance.spec.scenario import Scenario

_READ = {"group", *ROLLOUT_COLUMNS, "logprobs", "reward", "turns", "token_rewards", "branches", "sampling_mask"}
_COMPUTED = re.compile("advantage|return|value|(old|ref)(erence)?_?log_?prob", re.IGNORECASE)
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


Group = list[Document]
OF_MODEL = "{model}"  # in the path of a data set: the name of the scenario's model
MOST_TOKENS = MIB  # of one prompt or response; longer ones are mistakes
FILLED = 0.8  # share of the tokens of packed rows that a rollout should fill, so that whole groups fit


def build_rollouts(scenario: Scenario, model: Path) -> list[Batch]:
    """Builds batches for ``scenario.steps`` optimizer steps, up to the end of the first epoch of the last rollout.

    A rollout consists of ``mini_batches`` batches, which are trained on ``ppo_epochs`` times; its first batch has all
    of them in its field ``rollout``. A rollout is made of whole groups. ``scenario.seed`` shuffles the groups once;
    when they run out, they are used again. Responses to one prompt are spread over different rows. Without packing, a
    row is one document. Raises UsageError for data that do not allow this, and for tokens beyond the model's
    vocabulary.
    """
    objective = scenario.objective
    assert isinstance(objective, PolicyGradient), "only policy-gradient objectives read rollouts"
    count, data = objective.mini_batches, scenario.data
    decoder = decoder_of(scenario, model)
    groups = read_groups(scenario, vocabulary=decoder.vocab_size)
    random.Random(scenario.seed).shuffle(groups)
    endless = _repeated_groups(groups)
    rows = count * data.rows
    batches: list[Batch] = []
    begins: list[int] = []
    while len(batches) < scenario.steps:
        dealt = _packed_rows(endless, rows, scenario) if data.packed else _unpacked_rows(endless, rows, scenario)
        mini_batches = [dealt[start : start + data.rows] for start in range(0, rows, data.rows)]
        rollout = [
            Batch(len(batches) + number, data.max_len, tuple(Row(i, documents) for i, documents in enumerate(chosen)))
            for number, chosen in enumerate(mini_batches)
        ]
        _check_tokens(rollout, scenario)
        for epoch in range(objective.ppo_epochs):
            for number, batch in enumerate(rollout):
                batches.append(replace(batch, step=len(batches)))
                begins.append(count if epoch == number == 0 else 0)
    # The first epoch of the last rollout is kept as a whole: advantages need all its mini-batches.
    last = (scenario.steps - 1) // objective.steps_per_rollout * objective.steps_per_rollout
    kept = max(scenario.steps, last + count)
    return with_rollouts(batches[:kept], begins[:kept])


def read_groups(scenario: Scenario, *, vocabulary: int) -> list[Group]:
    """Reads the responses of the scenario's data set, one list of documents per group.

    The documents have the columns ``group`` and ``reward`` (one number each) and ``rollout_logprob`` (one number per
    token, 0 for tokens of the prompt). Raises UsageError, which names the file and the line, for a wrong response.
    """
    if scenario.data.too_long != "truncate" or scenario.data.max_samples is not None:
        raise UsageError(
            f"--too-long and --max-samples are for pairs of texts, but the objective {scenario.objective.kind!r} "
            f"reads rollouts, which are used unchanged; leave them out, or select cells with --cells 'sft*'"
        )
    drawn, path = random_model(resolve(scenario.model)), data_path(scenario)
    read = read_dataset(path, split=scenario.data.split)
    records = [each for place, record in read for each in flattened(record, place)]
    place, first = read[0]
    if not first.keys() & ROLLOUT_COLUMNS:
        raise UsageError(
            f"{place}: not a rollout, but the objective {scenario.objective.kind!r} reads rollouts; found "
            f"{shown([*first])}; give --data (data.path) a file of responses with group, "
            f"prompt_ids, completion_ids, logprobs and reward, or use a scenario of objective 'sft'"
        )
    of_small = drawn.tokens if drawn else vocabulary
    earns = any(has_given(record) for _, record in records)
    found = [_document(r, place, scenario.data.max_len, of_small, earns=earns) for place, r in records]
    if isinstance(scenario.objective, PolicyGradient) and scenario.objective.replay_sampling_mask:
        if drawn:
            raise UsageError(f"{path}: sampling masks are for models of the size that sampled; give another model")
        found = _with_masks(found, records, of_small)
    if drawn:
        found = [replace(document, tokens=tuple(map(drawn.spread, document.tokens))) for document in found]
    grouped = [(key, list(group)) for key, group in groupby(found, key=lambda document: document.columns["group"])]
    if len({key for key, _ in grouped}) < len(grouped):
        raise UsageError(f"{path}: the lines of one group must be consecutive; sort the file by group")
    if not is_builtin(path):
        _warn_of(read, records, found, scenario)
    return [group for _, group in grouped]


def _warn_of(
    read: Sequence[tuple[Place, Record]],
    records: Sequence[tuple[Place, Record]],
    documents: Sequence[Document],
    scenario: Scenario,
) -> None:
    """Warns, once, of columns that nothing reads, and of groups and masks that are defined but probably mistakes.

    read: the records of the file. records, documents: its responses.
    """
    path = scenario.data.path
    if unused := unused_columns((record for _, record in read), lambda name: name in _READ):
        computed = [name for name in unused if _COMPUTED.search(name)]
        hint = f"; {' and '.join(computed)}: such numbers are computed from rewards and models, not read"
        warn_once(f"{path}: columns that are not used: {', '.join(unused)}{hint if computed else ''}")

    def lines(places: Sequence[Place]) -> str:
        return first_few([place.rpartition(f"{path}, ")[2] for place in places], most=3)

    groups = [[*group] for _, group in groupby(records, key=lambda response: response[1]["group"])]
    for group in groups:
        _, one = group[0]
        if others := [place for place, each in group if each["prompt_ids"] != one["prompt_ids"]]:
            warn_once(
                f"{path}: group {one['group']} has responses to different prompts ({lines([group[0][0], others[0]])}), "
                f"but compares them as responses to one; correct 'group'"
            )
            break
    alone = [group[0][0] for group in groups if len(group) == 1]
    objective = scenario.objective
    if alone and isinstance(objective, Grpo) and objective.adv_estimator != "reinforce_plus_plus":
        warn_once(
            f"{path}: {len(alone)} of {len(groups)} groups have one response ({lines(alone)}), whose advantage follows "
            f"from its own reward alone; give several responses to each prompt the same 'group'"
        )
    answered = zip(records, documents, strict=True)
    masked = [place for (place, record), one in answered if record["completion_ids"] and not any(one.targets)]
    if masked:
        warn_once(
            f"{path}: {len(masked)} of {len(records)} responses have no token that is trained on ({lines(masked)}), "
            f"because masks or turns take all away"
        )


def has_data(scenario: Scenario) -> bool:
    """Tells whether there are rollouts of the scenario's model; True for data that do not depend on the model."""
    try:
        return OF_MODEL not in scenario.data.path or data_path(scenario).exists()
    except UsageError:
        return False


def data_path(scenario: Scenario) -> Path:
    """Returns the path of the scenario's data. Raises UsageError if it does not exist."""
    drawn = random_model(resolve(scenario.model))
    name = drawn.recipe.like if drawn else scenario.model_name
    try:
        return resolve(scenario.data.path.replace(OF_MODEL, name))
    except UsageError as error:
        if OF_MODEL not in scenario.data.path:
            raise
        raise UsageError(
            f"there are no rollouts of {name}, which scenario {scenario.name} needs ({error}); give --data a file of "
            f"responses with group, prompt_ids, completion_ids, logprobs and reward"
        ) from None


def _document(record: dict[str, Any], place: str, max_len: int, vocabulary: int, *, earns: bool) -> Document:
    """Returns the document of a response. earns: whether turns or tokens of the data set have rewards."""
    prompt, completion = (_tokens(record, key, place, vocabulary) for key in ("prompt_ids", "completion_ids"))
    if not prompt:
        raise UsageError(f"{place}: 'prompt_ids' is empty; a response needs at least one token to follow")
    if len(prompt) + len(completion) > max_len:
        raise UsageError(
            f"{place}: prompt and response have {len(prompt) + len(completion)} tokens, and --max-len (data.max_len) "
            f"is {max_len}; raise it, or leave the response out (a response that is cut would have another reward)"
        )
    written = written_by_policy(record, place, len(completion))
    masked = trained_tokens(record, place, prompt=len(prompt), response=len(completion))
    trained = tuple(one and other for one, other in zip(written, masked, strict=True))
    logprobs = record.get("logprobs")
    if isinstance(logprobs, list) and len(logprobs) == len(completion):  # a masked token was not sampled
        logprobs = [logprob if one else 0.0 for logprob, one in zip(logprobs, trained, strict=True)]
    needed = f"'logprobs' must be a list of {len(completion)} numbers from -1e4 to 0, one for each of 'completion_ids'"
    if not isinstance(logprobs, list) or len(logprobs) != len(completion):
        raise UsageError(f"{place}: {needed}, got {shown(logprobs)}")
    if wrong := [number for number, one in enumerate(logprobs) if not _is_logprob(one)]:
        raise UsageError(f"{place}: {needed}; that of token {wrong[0]} is {shown(logprobs[wrong[0]])}")
    group, reward = record.get("group"), record.get("reward")
    if isinstance(group, bool) or not isinstance(group, int) or not 0 <= group < 2**53:
        raise UsageError(f"{place}: 'group' must be an integer from 0 to 2**53 - 1, got {shown(group)}")
    if not _is_number(reward, -1e6, 1e6):
        raise UsageError(f"{place}: 'reward' must be a number between -1e6 and 1e6, got {shown(reward)}")
    before = (0.0,) * len(prompt)
    columns: dict[str, Column] = {"group": float(group), "reward": float(reward)}
    columns["rollout_logprob"] = (*before, *map(float, logprobs))
    if earns:
        columns[GIVEN] = (*before, *given_rewards(record, place, trained))
    return Document((*prompt, *completion), (False,) * len(prompt) + trained, columns)


def _with_masks(found: list[Document], records: list[tuple[str, dict[str, Any]]], vocabulary: int) -> list[Document]:
    """Adds the columns KEPT, as many as the largest mask has tokens."""
    masks = [_mask(d, record, place, vocabulary) for d, (place, record) in zip(found, records, strict=True)]
    widest = max((len(kept) for mask in masks for kept in mask), default=0)
    return [
        replace(
            document,
            columns={
                **document.columns,
                **{
                    f"{KEPT}{k}": tuple(1.0 + kept[k] if k < len(kept) else 0.0 for kept in mask) for k in range(widest)
                },
            },
        )
        for document, mask in zip(found, masks, strict=True)
    ]


def _mask(document: Document, record: dict[str, Any], place: str, vocabulary: int) -> list[list[int]]:
    """Returns the tokens that the sampler kept at each token of a document; none where it drew no target."""
    given = record.get("sampling_mask")
    count = len(record["completion_ids"])
    if not isinstance(given, dict):
        raise UsageError(
            f"{place}: no 'sampling_mask' with token_ids and offsets, but the objective has replay_sampling_mask; "
            f"record what the sampler kept (return_sampling_mask of vLLM), or set it to false"
        )
    tokens, offsets = _tokens(given, "token_ids", place, vocabulary), given.get("offsets")
    if (
        not isinstance(offsets, list)
        or len(offsets) != count + 1
        or any(type(one) is not int for one in offsets)
        or offsets != sorted(offsets)
        or (offsets[0], offsets[-1]) != (0, len(tokens))
    ):
        raise UsageError(
            f"{place}: 'offsets' of 'sampling_mask' must be {count + 1} rising integers from 0 to {len(tokens)}, the "
            f"number of its 'token_ids', got {shown(offsets)}"
        )
    kept = [tokens[start:end] for start, end in pairwise(offsets)]
    whole = [*([] for _ in range(len(document.tokens) - count)), *kept]
    for number, (token, target, mask) in enumerate(zip(document.tokens, document.targets, whole, strict=True)):
        if target and token not in mask:
            raise UsageError(
                f"{place}: the sampling mask of token {number - len(document.tokens) + count} of the response does not "
                f"hold the token itself, {token}; give the masks of the sampler that drew the response"
            )
    return [mask if target else [] for mask, target in zip(whole, document.targets, strict=True)]


def _tokens(record: dict[str, Any], key: str, place: str, vocabulary: int) -> list[int]:
    tokens = record.get(key)
    if not isinstance(tokens, list) or len(tokens) > MOST_TOKENS:
        raise UsageError(f"{place}: {key!r} must be a list of tokens, got {shown(tokens)}")
    for token in tokens:
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocabulary:
            raise UsageError(
                f"{place}: {key!r} holds {shown(token)}, which is not a token of a vocabulary of {vocabulary}; sample "
                f"the rollouts with the tokenizer of this model"
            )
    return tokens


def _is_number(value: Any, lowest: float, highest: float) -> TypeGuard[float]:
    return not isinstance(value, bool) and isinstance(value, int | float) and lowest <= value <= highest


def _is_logprob(value: Any) -> bool:
    return _is_number(value, -1e4, 1e-3)  # an inference engine may round to slightly more than 0


def _repeated_groups(groups: list[Group]) -> Iterator[Group]:
    """Yields the groups again and again with new group numbers, so that a repeated group counts as another group."""
    for number, group in enumerate(cycle(groups)):
        yield [replace(document, columns={**document.columns, "group": float(number)}) for document in group]


def _check_tokens(rollout: list[Batch], scenario: Scenario) -> None:
    """Raises UsageError for a mini-batch of fewer than two target tokens: whitening and explained variance need two.

    Also raises it for a step that has no target token because ``filter_groups`` leaves all of its groups out.
    """
    functions = functions_of(scenario.objective)
    kept = functions.sampled(rollout) if isinstance(functions, ResponseFunctions) else rollout
    for number, (batch, rest) in enumerate(zip(rollout, kept, strict=True), start=1):
        if batch.target_count < 2:
            raise UsageError(
                f"mini-batch {number} of a rollout of {scenario.data.path} has {batch.target_count} tokens in its "
                f"responses, but means and variances over tokens need at least two; raise data.rows, or leave empty "
                f"responses out"
            )
        if batch.step < scenario.steps and rest.target_count == 0:
            raise UsageError(
                f"{scenario.data.path}: step {batch.step} has no target token, because objective.filter_groups leaves "
                f"out groups of equal rewards, and all of its groups are such; raise data.rows, give groups of "
                f"different rewards, or set filter_groups to false"
            )


def _unpacked_rows(groups: Iterator[Group], rows: int, scenario: Scenario) -> list[tuple[Document, ...]]:
    """Takes whole groups, one row per response, and shuffles the rows unless ``data.spread_groups`` is false."""
    taken: list[Document] = []
    while len(taken) < rows:
        taken += next(groups)
    if len(taken) > rows:
        raise UsageError(
            f"a rollout of {rows} rows (data.rows times objective.mini_batches) cuts a group of "
            f"{scenario.data.path}; choose data.rows so that whole groups fill the rollout"
        )
    if scenario.data.spread_groups:
        random.Random(len(taken)).shuffle(taken)
    return [(document,) for document in taken]


def _packed_rows(groups: Iterator[Group], rows: int, scenario: Scenario) -> list[tuple[Document, ...]]:
    """Packs whole groups into rows: the longest response first, each into the row with the most free tokens.

    Raises UsageError if a response does not fit, or if a row would hold fewer than two responses.
    """
    max_len = scenario.data.max_len
    capacity = rows * max_len
    taken: list[Document] = []
    while sum(len(d.tokens) for d in taken) < FILLED * capacity - max_len or len(taken) < 2 * rows:
        taken += next(groups)
    packed: list[list[Document]] = [[] for _ in range(rows)]
    free = [max_len] * rows
    for document in sorted(taken, key=lambda d: -len(d.tokens)):
        row = max(range(rows), key=lambda r: (free[r], -r))
        packed[row].append(document)
        free[row] -= len(document.tokens)
    if min(free) < 0 or min(map(len, packed)) < 2:
        raise UsageError(
            f"--max-len {max_len} (data.max_len) does not pack whole groups of {scenario.data.path} into {rows} rows "
            f"with at least two responses in each; raise it, or use data.packed=false"
        )
    return [tuple(documents) for documents in packed]
