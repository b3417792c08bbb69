"""What is declared, and what is not."""

from hotrack.plan.ledger import assumed, operator, stated


def test_a_declared_size_is_the_operators_word_and_none_is_an_assumption() -> None:
    assert stated(None) == assumed(0)
    assert stated(5) == operator(5)
