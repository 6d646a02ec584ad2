"""What `recserve` itself offers: every listed name is there, sorted, and costs nothing unused."""

import subprocess
import sys

import pytest

import recserve
from recserve import messages
from recserve.schemas import items


def test_every_public_name_is_there_and_sorted():
    assert recserve.__all__ == sorted(recserve.__all__)
    for name in recserve.__all__:
        assert getattr(recserve, name) is not None
    with pytest.raises(AttributeError, match="public names"):
        recserve.nothing  # noqa: B018


def test_old_names_of_messages_work_and_say_where_they_are_now():
    with pytest.warns(DeprecationWarning, match=r"recserve\.schemas\.items\.UserRef"):
        from recserve.messages import UserRef
    assert UserRef is items.UserRef
    with pytest.raises(ImportError, match="nothing"):
        from recserve.messages import nothing  # noqa: F401


@pytest.mark.parametrize(
    "old,new", [("RecommendBody", "RecommendRequest"), ("RankBody", "RankRequest")]
)
def test_old_public_names_work_and_say_the_new_ones(old, new):
    with pytest.warns(DeprecationWarning, match=f"recserve.{new}"):
        assert getattr(recserve, old) is getattr(recserve, new)
    with pytest.warns(DeprecationWarning, match=new):
        assert getattr(messages, old) is getattr(items, new)


def test_the_package_alone_imports_no_torch():
    code = "import sys, recserve; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
