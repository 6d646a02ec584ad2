"""Where a reading of a drafter's files changes a field."""

from recserve.models.drafters.shared_questions import placed


def test_a_field_is_changed_inside_the_first_object_that_has_it():
    fields = {"a": None, "b": {"x": 1}, "c": {"x": 2, "y": 3}, "y": 4}
    assert placed(fields, "x", 9, ("a", "b", "c")) == {"b": {"x": 9}}
    assert placed(fields, "y", 9, ("a", "b")) == {"y": 9}
