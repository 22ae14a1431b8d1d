from pathlib import Path

from tests.mutants.places import beside, elsewhere, sources


def test_the_test_files_of_the_same_name_are_beside_a_file() -> None:
    names = ["test_pages.py", "test_pages_in_flight.py"]
    assert beside(Path("kvcache/pool/pages.py")) == [f"tests/kvcache/pool/{name}" for name in names]


def test_a_file_without_a_test_file_of_its_name_is_tested_through_its_doors() -> None:
    assert beside(Path("kvcache/claims.py"))[0] == "tests/kvcache/test_misuse.py"


def test_a_file_that_no_table_names_is_tested_by_its_folder() -> None:
    found = beside(Path("kvcache/pool/no_such_file.py"))
    assert "tests/kvcache/pool/test_pages.py" in found
    assert {Path(name).parent for name in found} == {Path("tests/kvcache/pool")}


def test_elsewhere_is_the_folder_and_the_doors_of_the_package_for_all_files_of_a_folder() -> None:
    found = elsewhere(Path("kvcache/pool/pages.py"))
    assert found == elsewhere(Path("kvcache/pool/index.py"))
    assert {"tests/kvcache/test_manager.py", "tests/kvcache/pool/test_index.py"} <= set(found)


def test_only_code_that_needs_another_environment_has_no_tests_here() -> None:
    assert {path.parts[:2] for path in sources() if not beside(path)} <= {("scheduler_adapters", "vllm")}
