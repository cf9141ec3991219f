"""From the words of a command line to a typed command, after Slurm's sacctmgr(1). Pure: no I/O, no database.

Called by main. Every word list gives a command or a UsageError that names the word at fault; what is in the
database is the actions' business. What an entity is called, its keys and what
is made of them stand in entities.
"""

from collections.abc import Sequence

from spur_events import errors
from spur_events.producers.sacctmgr import commands, entities, words

_ACTIONS = {
    "add": "add",
    "create": "add",
    "modify": "modify",
    "update": "modify",
    "delete": "delete",
    "remove": "delete",
    "show": "show",
    "list": "show",
}
_SHORTEST_ACTION = 3
_ASSOCIATION_WORDS = frozenset({"withassoc", "withassociations"})


def parse(arguments: Sequence[str]) -> tuple[commands.Options, commands.Command]:
    """Return the options and the command that the words mean.

    Raises:
        UsageError: naming the word that cannot be understood, and what is known instead.
    """
    options, rest, special = _options(arguments)
    if special is not None:
        return options, special
    if not rest:
        raise errors.UsageError(
            "no command; write 'sacctmgr show account', or 'sacctmgr help' for all of them"
        )
    if rest[0].lower() in {"help", "version"} and len(rest) == 1:
        return options, commands.Help() if rest[0].lower() == "help" else commands.Version()
    action = _action(rest[0])
    if len(rest) == 1:
        raise errors.UsageError(f"{rest[0]!r} needs an entity; known are {', '.join(entities.ENTITIES)}")
    entity = entities.find(rest[1])
    clauses = _clauses(action, entity, rest[2:])
    clauses.associations |= options.associations
    return options, entity.builders[action](clauses)


_Special = commands.Help | commands.Version | None


def _options(arguments: Sequence[str]) -> tuple[commands.Options, list[str], _Special]:
    flags: dict[str, bool] = {}
    style = commands.Style.TABLE
    rest: list[str] = []
    special: _Special = None
    remaining = list(arguments)
    while remaining:
        word = remaining.pop(0)
        if word == "--":
            rest += remaining
            break
        if not word.startswith("-") or word == "-":
            rest.append(word)
            continue
        for letter in [word] if word.startswith("--") else [f"-{letter}" for letter in word[1:]]:
            name = _OPTION_NAMES.get(letter)
            if name is None:
                raise errors.UsageError(
                    f"{words.unknown('option', letter, word, _LONG_OPTIONS, _OPTION_NAMES)}"
                    f"; a name that begins with '-' is written name={word[:20]}"
                )
            if name in {"help", "version"}:
                special = special or (commands.Help() if name == "help" else commands.Version())
            elif name in {"parsable", "parsable2", "json"}:
                style = commands.Style(name)
            else:
                flags[name] = name != "header"
    return commands.Options(style=style, **flags), rest, special


_OPTION_NAMES = {
    "-i": "immediate",
    "--immediate": "immediate",
    "-n": "header",
    "--noheader": "header",
    "-p": "parsable",
    "--parsable": "parsable",
    "-P": "parsable2",
    "--parsable2": "parsable2",
    "--json": "json",
    "-Q": "quiet",
    "--quiet": "quiet",
    "-r": "readonly",
    "--readonly": "readonly",
    "-s": "associations",
    "--associations": "associations",
    "-h": "help",
    "--help": "help",
    "-V": "version",
    "--version": "version",
}
_LONG_OPTIONS = [name for name in _OPTION_NAMES if name.startswith("--")]


def _action(word: str) -> str:
    lower = word.lower()
    if lower in _ACTIONS:
        return _ACTIONS[lower]
    if len(lower) >= _SHORTEST_ACTION:
        for name, action in _ACTIONS.items():
            if name.startswith(lower):
                return action
    raise words.unknown("action", word, word, [*_ACTIONS, "help", "version"])


def _clauses(action: str, entity: entities.Entity, rest: Sequence[str]) -> entities.Clauses:
    found = entities.Clauses()
    # What is given to `add` is set; everything else selects, until the word "set".
    target = found.set if action == "add" else found.where
    for word in rest:
        lower = word.lower()
        if lower == "where" and action != "add":
            target = found.where
        elif lower == "set" and action == "modify":
            target = found.set
        elif lower in _ASSOCIATION_WORDS and action == "show":
            found.associations = True
        elif "=" in word:
            _assign(action, entity, target, word, setting=target is found.set)
        elif target is found.where or action == "add":
            if target and action != "show":
                raise errors.UsageError(
                    f"{words.shown(word)} stands behind key=value; names come first, and a value with spaces needs"
                    ' quotes, as in description="two words"'
                )
            found.positional.append(word)
        else:
            raise errors.UsageError(f"{words.shown(word)} has no '='; write key=value behind 'set'")
    return found


def _assign(
    action: str, entity: entities.Entity, target: dict[str, str], word: str, *, setting: bool
) -> None:
    given = words.assignment(word)
    allowed = (entity.settable if setting else entity.selecting)[action]
    by_name = {name: key for key, names in entity.keys.items() for name in (key, *names)}
    key = by_name.get(given.key)
    if action == "modify" and setting and key is not None and key in entity.refusals:
        raise errors.UsageError(f"{words.shown(word)}: {entity.refusals[key]}")
    if key is None or key not in allowed:
        place = " behind 'set'" if action == "modify" and setting else ""
        near = {name for name, canonical in by_name.items() if canonical in allowed}
        problem = "key" if key is None else f"key for {action} {entity.name}{place}:"
        raise words.unknown(problem, given.key, word, list(allowed), sorted(near))
    if key in target:
        raise errors.UsageError(f"{key} is given twice, the second time in {words.shown(word)}; give it once")
    if not given.value.strip() and key not in entities.MAY_BE_EMPTY:
        raise errors.UsageError(
            f"{given.key}= has no value; {entities.REMEDIES.get(key, f'write {given.key}=VALUE')}"
        )
    target[key] = given.value
