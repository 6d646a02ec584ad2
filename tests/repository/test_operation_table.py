"""The HTTP reference lists the operations of the table."""

from tests.support.operation_table import PAGE, section


def test_the_reference_lists_all_operations():
    page = PAGE.read_text(encoding="utf-8")
    assert page == section(page), "run: python -m tests.support.operation_table"
