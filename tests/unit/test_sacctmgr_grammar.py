"""Words to commands: what each line means, and that nothing but a command or a UsageError comes out."""

import shlex

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from spur_events import errors
from spur_events.producers import changes
from spur_events.producers.sacctmgr import commands, grammar

A = changes.AccountPatch
U = changes.UserPatch


def parse(line: str) -> commands.Command:
    return grammar.parse(shlex.split(line))[1]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("add account physics", commands.AddAccounts(names=("physics",), patch=A())),
        ("create Account Name=Physics", commands.AddAccounts(names=("physics",), patch=A())),
        (
            'add account name=a,b description="two words" org=x parent=Root grptres=CPU=4,gpu=0 fairshare=2 maxjobs=-1',
            commands.AddAccounts(
                names=("a", "b"),
                patch=A(
                    description="two words",
                    organization="x",
                    parent="root",
                    limits={"cpu": 4, "gres/gpu": 0},
                    fairshare=2,
                    max_jobs=-1,
                ),
            ),
        ),
        ("add account a b,c a", commands.AddAccounts(names=("a", "b", "c"), patch=A())),
        ("add account name='\"a,b\",c'", commands.AddAccounts(names=("a,b", "c"), patch=A())),
        ("add account name=-lab", commands.AddAccounts(names=("-lab",), patch=A())),
        ("add account -- -lab", commands.AddAccounts(names=("-lab",), patch=A())),
        ("add account name='a b'", commands.AddAccounts(names=("a b",), patch=A())),
        ("add account x desc=", commands.AddAccounts(names=("x",), patch=A(description=""))),
        ("add account x desc=a=b", commands.AddAccounts(names=("x",), patch=A(description="a=b"))),
        ("add account x desc='\"q\"'", commands.AddAccounts(names=("x",), patch=A(description="q"))),
        (
            "modify account physics set fairshare=2",
            commands.ModifyAccounts(names=("physics",), patch=A(fairshare=2)),
        ),
        (
            "update acct where name=a set desc=x",
            commands.ModifyAccounts(names=("a",), patch=A(description="x")),
        ),
        (
            "modify account set desc=x where name=a",
            commands.ModifyAccounts(names=("a",), patch=A(description="x")),
        ),
        (
            "mod acc a set grptres=cpu=-1",
            commands.ModifyAccounts(names=("a",), patch=A(limits={"cpu": None})),
        ),
        ("delete account a,b", commands.DeleteAccounts(names=("a", "b"))),
        ("remove accounts where names=a", commands.DeleteAccounts(names=("a",))),
        (
            "add user alice account=physics",
            commands.AddUsers(names=("alice",), accounts=("physics",), patch=U()),
        ),
        (
            "add user name=Alice,bob accounts=a,b defaultaccount=B adminlevel=Admin",
            commands.AddUsers(
                names=("alice", "bob"),
                accounts=("a", "b"),
                patch=U(default_account="b", admin_level="administrator"),
            ),
        ),
        (
            "add user x defaultaccount=a",
            commands.AddUsers(names=("x",), accounts=(), patch=U(default_account="a")),
        ),
        (
            "modify user where name=x account=a set adminlevel=operator",
            commands.ModifyUsers(names=("x",), accounts=("a",), patch=U(admin_level="operator")),
        ),
        ("delete user x", commands.DeleteUsers(names=("x",), accounts=())),
        ("delete user name=x account=a,b", commands.DeleteUsers(names=("x",), accounts=("a", "b"))),
        ("help", commands.Help()),
        ("add account x --help", commands.Help()),
        ("-V", commands.Version()),
    ],
)
def test_meaning(line: str, expected: commands.Command) -> None:
    assert parse(line) == expected


def test_show_and_its_format() -> None:
    command = parse("show account format=Account%-12,grptres%40,org physics,bio withassoc")
    assert isinstance(command, commands.ShowAccounts)
    assert command.names == ("physics", "bio")
    assert command.associations
    assert [(field.column.key, field.width) for field in command.fields] == [
        ("account", -12),
        ("grptres", 40),
        ("organization", 20),
    ]
    users = parse("list users where account=a")
    assert isinstance(users, commands.ShowUsers)
    assert users.accounts == ("a",)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("-i add account x", commands.Options(immediate=True)),
        ("add account x -i", commands.Options(immediate=True)),
        ("-inP show account", commands.Options(immediate=True, header=False, style=commands.Style.PARSABLE2)),
        ("-p show account", commands.Options(style=commands.Style.PARSABLE)),
        ("--json --noheader show user", commands.Options(header=False, style=commands.Style.JSON)),
        ("-sQr show user", commands.Options(associations=True, quiet=True, readonly=True)),
    ],
)
def test_options(line: str, expected: commands.Options) -> None:
    assert grammar.parse(shlex.split(line))[0] == expected


@pytest.mark.parametrize(
    ("line", "parts"),
    [
        ("", ["no command", "help"]),
        ("frobnicate account x", ["'frobnicate'", "add"]),
        ("ad account x", ["'ad'", "did you mean 'add'"]),
        ("add", ["needs an entity", "account, user"]),
        ("add acount x", ["'acount'", "did you mean 'account'"]),
        ("add cluster x", ["'cluster'", "account, user"]),
        ("--frob add account x", ["'--frob'", "--json"]),
        ("-Z show user", ["'-Z'"]),
        ("add account -lab", ["name=-lab"]),
        ("add account", ["no name"]),
        ("add account x desription=y", ["'desription'", "did you mean 'description'", "grptres"]),
        ("add account x =y", ["no key", "'=y'"]),
        ("add account name=a name=b", ["name is given twice", "'name=b'"]),
        ("add account x desc=a description=b", ["description is given twice"]),
        ("add account x name=y", ["names are given twice"]),
        ("add account x desc=High Energy", ["'Energy'", "quotes"]),
        ("add account name=", ["name= has no value"]),
        ("add account name=a,,b", ["empty element"]),
        ("add account name='\"a'", ["quote is not closed"]),
        ("add account ' '", ["empty"]),
        (f"add account name={'x' * 256}", ["256 characters", "at most 255"]),
        ("add account name='a\tb'", ["control character U+0009", "position 2"]),
        ("add account x desc='a\nb'", ["description", "U+000A"]),
        ("add account x grptres=", ["grptres= has no value", "cpu=-1"]),
        ("add account x grptres=cpu=abc", ["'cpu=abc'", "whole number"]),
        ("add account x grptres=mem=1G", ["'mem=1G'", "mem=1024"]),
        ("add account x grptres+=cpu=4", ["+= is not supported", "grptres=value"]),
        ("add account x fairshare=1.5", ["fairshare=1.5", "whole number"]),
        ("add account x fairshare=2147483648", ["out of range", "2147483647"]),
        ("add account x maxjobs=-2", ["out of range", "maxjobs=-1"]),
        ("add account x maxjobs=", ["maxjobs= has no value", "-1"]),
        ("add account x parent=", ["parent=root"]),
        ("modify account x", ["nothing to set"]),
        ("modify account x set", ["nothing to set"]),
        ("modify account set desc=x", ["no name"]),
        ("modify account x set name=y", ["cannot be renamed"]),
        ("modify account x set desc", ["no '='"]),
        ("modify account x desc=y", ["modify account", "'desc'"]),
        ("modify user x set account=y", ["add user"]),
        ("modify user x set name=y", ["cannot be renamed"]),
        ("delete account", ["no name"]),
        ("delete account x desc=y", ["delete account", "known are name"]),
        ("add user x", ["no account", "account=NAME"]),
        ("add user x account=", ["account= has no value"]),
        ("add user x account=a adminlevel=king", ["adminlevel=king", "operator"]),
        ("show account format=nme", ["'nme'", "did you mean 'name'"]),
        ("show account format=account%x", ["account%x", "NUMBER"]),
        ("show account format=account%0", ["account%0"]),
        ("show account format=", ["format= has no value"]),
    ],
)
def test_refusals(line: str, parts: list[str]) -> None:
    with pytest.raises(errors.UsageError) as caught:
        parse(line)
    assert "\n" not in str(caught.value)
    for part in parts:
        assert part in str(caught.value)


WORDS = st.one_of(
    st.sampled_from(
        shlex.split(
            "add create modify delete show list help account accounts user users where set withassoc name= name=a "
            "account=a desc=x grptres=cpu=1 grptres= fairshare=-1 defaultaccount=a adminlevel=none format=account%3 "
            "-i -nP --json -- - -x x a,b ,"
        )
    ),
    st.text(max_size=12),
    st.builds(
        "{}={}".format, st.sampled_from(["name", "grptres", "maxjobs", "format", "desc"]), st.text(max_size=8)
    ),
)


@given(st.lists(WORDS, max_size=8))
@example(["add", "account", "name=\udcff"])
@example(["add", "account", "name=\x00"])
@example(["show", "account", f"format=account%{'9' * 5000}"])
@example(["add", "account", "x", f"maxjobs={'9' * 5000}"])
@example(["add", "account", "x", "maxjobs=-"])
@example(["add", "account", "x", "maxjobs=²"])
@settings(max_examples=500)
def test_any_words_give_a_command_or_a_usage_error(given_words: list[str]) -> None:
    try:
        options, command = grammar.parse(given_words)
    except errors.UsageError as error:
        assert str(error)  # noqa: PT017 - either outcome is right
    else:
        assert isinstance(options, commands.Options)
        assert isinstance(command, commands.Command)


@given(
    st.lists(st.sampled_from(["add", "modify", "delete"]), min_size=1, max_size=1),
    st.lists(WORDS, max_size=6),
)
def test_names_that_get_through_can_be_stored(action: list[str], rest: list[str]) -> None:
    try:
        _, command = grammar.parse([*action, "account", *rest])
    except errors.UsageError:
        return
    for name in getattr(command, "names", ()):
        assert name
        assert changes.account_name(name) == name
