import torch

from paceline.run.step_records import Late


def test_numbers_come_out_in_order_with_their_notes() -> None:
    late: Late[str] = Late(torch.device("cpu"))
    late.push("first", [torch.tensor(1.5), torch.tensor(True)])
    late.push("second", [torch.tensor(2), torch.tensor(float("inf"))])
    assert list(late.ready()) == [("first", [1.5, 1.0]), ("second", [2.0, float("inf")])]
    assert list(late.flush()) == []
