"""Account and user names as Kubernetes names: injective, valid, stable (design rule 8; C24, C26)."""

import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from spur_events.schemas import names

LABEL = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?", re.ASCII)

#: Names near the border between those that are their own slug and those that get a hash.
lookalikes = st.one_of(
    st.text(),
    st.text(alphabet="ab-_. A", max_size=60),
    st.text(alphabet="ab-", min_size=50, max_size=56),
    st.builds(names.slug, st.text()),
    st.from_regex(r"[a-z0-9-]{0,40}--[a-z2-7]{15,17}", fullmatch=True),
)


@given(lookalikes)
@example("")
@example("a" * 53)
@example("a" * 54)
@example("x\n")
@example("\x00")
@example("\ud800")
@example("ﬁ\u0130")
def test_slug_is_a_label_that_fits_behind_the_prefix(name: str) -> None:
    slug = names.slug(name)
    assert LABEL.fullmatch(slug)
    assert len(slug) <= names.MAX_SLUG_LENGTH == 53
    for full in (names.namespace(name), names.service_account(name)):
        assert LABEL.fullmatch(full)
        assert len(full) <= 63


@given(lookalikes, lookalikes)
@example("physics_lab", "physics.lab")
@example("Physics-Lab", "physics-lab")
@example("a" * 53 + "x", "a" * 53 + "y")
def test_two_names_never_share_a_slug(left: str, right: str) -> None:
    assert (names.slug(left) == names.slug(right)) == (left == right)


@given(lookalikes)
@example("_lab")
def test_a_name_that_is_anothers_slug_does_not_take_it(name: str) -> None:
    slug = names.slug(name)
    if slug != name:
        assert names.slug(slug) != slug


@pytest.mark.parametrize(
    ("name", "slug"),
    [
        ("physics", "physics"),
        ("9lab", "9lab"),
        ("a", "a"),
        ("a--b", "a--b"),
        ("a" * 53, "a" * 53),
        ("", "x--4oymiquy7qobjgx3"),
        ("_lab", "lab--2xvsniyhtsfxzgdj"),
        ("-lab", "lab--f6ln7hzoxglc2q6o"),
        ("lab-", "lab--wtrdcxt7fuiygja3"),
        ("LAB", "lab--pjrohlb5pqdoe42g"),
        ("___", "x--xwrfcvil6bdy6qls"),
        ("_@x.org", "x-org--volmrmqamowpemve"),
        ("Alice.Smith", "alice-smith--f3hieuapknheldta"),
        ("physics_lab", "physics-lab--ktxtiw5gylrgljcv"),
        ("physics.lab", "physics-lab--tpgvzbkglww3fvm7"),
        ("Physics-Lab", "physics-lab--ce3abndkxi2w2p5m"),
        ("a" * 54, "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa--upybw2jzevqsowbk"),
        ("physik-\xfc", "physik--22gpfs3ht66ms2x5"),
        ("x--aaaaaaaaaaaaaaaa", "x-aaaaaaaaaaaaaaaa--jfk3zmo27sf27sx3"),
    ],
)
def test_slugs_never_change(name: str, slug: str) -> None:
    # Another value here renames the namespaces of every site.
    assert names.slug(name) == slug


def test_prefixes_are_those_of_spur() -> None:
    assert names.namespace("physics") == "spur-acct-physics" == names.namespace_of_slug("physics")
    assert names.service_account("alice") == "spur-user-alice"
