import re
from pathlib import Path


FOLDER = Path(__file__).parent


def test_every_rule_is_in_the_table_and_has_a_test() -> None:
    """The numbers in the docstrings of this folder are those of its README."""
    listed = re.findall(r"^\| (\d+) \|", (FOLDER / "README.md").read_text("utf-8"), re.MULTILINE)
    texts = [file.read_text("utf-8") for file in FOLDER.glob("test_*.py")]
    cited = [rules for text in texts for rules in re.findall(r"\(rules? ([^)]*)\)", text)]
    numbers = {number for rules in cited for number in re.findall(r"\d+", rules)}

    assert listed == [str(number) for number in range(1, len(listed) + 1)]
    assert numbers == set(listed)
