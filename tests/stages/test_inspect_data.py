"""The command inspect_data: what a person sees of a step, a sample and a corpus, and refusals."""

import json
import shutil

import pytest
from click.testing import CliRunner

from lib.data.indexed_dataset import bin_path
from lib.data.tokens_manifest import TokensManifest
from stages.inspect_data import main
from tests.workflow.text_run import CODE, PAIR, PAIR_TEXTS, PROSE, write_texts

RULES = {"eod_in_loss": False, "positions": "document", "attention": "document"}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A project's folder with a run configuration of two copies, and parameters for its corpora."""
    run = write_texts(tmp_path_factory.mktemp("project"))
    (run.folder / "outputs").mkdir()
    config = run.config(2, 1, 2, (2, 1), **RULES)
    (run.folder / "outputs/run_config.json").write_text(config.to_json())
    pair = run.manifests[PAIR].with_name("pair_text_document").relative_to(run.folder)
    (run.folder / "params.yaml").write_text(
        f"corpora: {{{CODE}: {{}}, {PROSE}: {{}}}}\ndata: {{imported: {{{PAIR}: {pair}}}}}\n"
    )
    return run


@pytest.fixture(autouse=True)
def _in_project(run, monkeypatch):
    monkeypatch.chdir(run.folder)


def inspect(*arguments):
    done = CliRunner().invoke(main, [str(each) for each in arguments])
    assert done.exit_code == 0, done.output
    return done


def lines_of(*arguments):
    return [json.loads(line) for line in inspect(*arguments).stdout.splitlines()]


def test_the_documents_of_a_step(run):
    done = inspect("step", 3)
    head, *lines = done.stdout.splitlines()
    assert head == "step 3: 8 samples of 16 tokens, from position 8 of the run on"
    samples = lines_of("step", 3, "--json")
    assert [line for line in lines if line.startswith("  position")] == [
        f"  position {each['position']}: {each['corpus']} {each['sample']}" for each in samples
    ]
    assert [each["position"] for each in samples] == list(range(8, 16))
    assert done.stderr.count("warning: theirs: its tokens were made elsewhere") == 1
    documents = [(each["corpus"], found) for each in samples for found in each["documents"]]
    assert {corpus for corpus, _ in documents} == {CODE, PROSE, PAIR}
    for corpus, found in documents:
        if corpus == PAIR:
            assert found["source"] is None
            assert found["text"] == PAIR_TEXTS[found["document"]]
        else:
            assert found["text"] == run.texts[corpus][found["line"] - 1]
            place = f"(raw {found['raw_document']}): s, line {found['line']}; tokens"
            assert place in done.stdout
        assert repr(found["text"][:60]) in done.stdout


def test_the_documents_of_one_process(run):
    """Ranks 2 and 3 are the second copy: the second half of each round of micro batches."""
    whole = {each["position"]: each for each in lines_of("step", 4, "--json")}
    for rank, expected in ((0, [16, 17, 20, 21]), (1, [16, 17, 20, 21]), (2, [18, 19, 22, 23])):
        read = lines_of("step", 4, "--rank", rank, "--json")
        assert [each["position"] for each in read] == expected
        groups = [each.pop("group") for each in read]
        assert groups == ["micro batch 0"] * 2 + ["micro batch 1"] * 2
        assert read == [whole[position] for position in expected]
    layout = ["--layout", "tensor=1,data=4,micro_batch_size=1"]
    read = lines_of("step", 4, "--rank", 2, *layout, "--json")
    assert [each["position"] for each in read] == [18, 22]
    done = inspect("step", 4, "--rank", 3)
    assert done.stdout.splitlines()[0].endswith("; rank 3 reads for copy 1 of 2")
    assert done.stdout.count("micro batch ") == 2


def test_a_sample_token_by_token(run):
    (found,) = lines_of("sample", CODE, 3, "--json")
    rows = found["tokens"]
    assert len(rows) == 16
    pieces = {each["place"]: each for each in found["documents"]}
    for piece in found["documents"]:
        ids = [*run.tokenizer.encode(piece["text"]), run.tokenizer.eod_id]
        for place, token in enumerate(ids[piece["first"] : piece["last"]], start=piece["place"]):
            if place < 16:
                row = rows[place]
                assert (row["token"], row["place"]) == (token, place)
                assert (row["position"], row["sees_from"]) == (
                    place - piece["place"],
                    piece["place"],
                )
            if place > 0:
                assert rows[place - 1]["label"] == token
                assert rows[place - 1]["counts"] == (token != run.tokenizer.eod_id)
    lines = inspect("sample", CODE, 3).stdout.splitlines()
    assert lines[0] == f"code 3: tokens {found['start']} to {found['start'] + 16}"
    assert len([line for line in lines if line.startswith("-- document")]) == len(pieces)
    texts = [line for line in lines[2:] if not line.startswith("--")]
    assert [line.split()[0] for line in texts] == [str(place) for place in range(16)]
    assert all(repr(row["text"]) in line for row, line in zip(rows, texts, strict=True))


def test_a_sample_of_a_pair_made_elsewhere_and_of_a_later_phase(run):
    done = inspect("sample", PAIR, 0)
    assert "warning: theirs: its tokens were made elsewhere" in done.stderr
    assert "-- document 0; tokens 0 to" in done.stdout
    assert len(lines_of("sample", PROSE, 1, "--seq-length", 32, "--json")[0]["tokens"]) == 32
    shorter, longer = (
        lines_of("sample", PROSE, k, "--seq-length", size, "--json")[0]["start"]
        for k, size in ((2, 16), (1, 32))
    )
    assert shorter == longer
    first = lines_of("sample", PROSE, 0, "--json")[0]["documents"][0]
    assert lines_of("sample", PROSE, 0, "--split", "valid", "--json")[0]["documents"][0] != first


def test_a_summary_of_all_corpora(run):
    done = inspect("corpus")
    for name in (CODE, PROSE, PAIR):
        assert f"Corpus {name}" in done.stdout
    code = TokensManifest.load(run.manifests[CODE])
    assert f"{code.documents} in 2 pair(s) of files" in done.stdout
    assert f"{code.text_bytes / code.tokens:.3f}" in done.stdout
    assert f"{code.empty_documents} empty, {code.short_documents} too short" in done.stdout
    assert done.stdout.count("none: the tokenizer has no unknown token") == 3
    assert done.stdout.count("not counted: tokens made elsewhere") == 1
    assert done.stdout.count("not known: the raw corpus of these tokens is not at hand") == 1
    assert done.stdout.count("of the tokens\n") > 6


def test_a_picture_of_the_lengths(run):
    done = inspect("corpus", PROSE, "--picture", "outputs/prose.svg")
    assert "wrote outputs/prose.svg" in done.stdout
    assert f"Corpus {CODE}" not in done.stdout
    assert (run.folder / "outputs/prose.svg").read_text().startswith("<svg ")


def test_verifying(run):
    done = inspect("verify")
    assert done.stdout.count(": all as ") == 3
    assert inspect("verify", PAIR).stdout.count(": all as ") == 1


def test_what_is_spoilt_is_one_clear_error(run, tmp_path, monkeypatch):
    shutil.copytree(run.folder, tmp_path / "copy")
    monkeypatch.chdir(tmp_path / "copy")
    prefix = TokensManifest.load(run.manifests[PROSE]).prefixes(run.manifests[PROSE])[0]
    path = bin_path(tmp_path / "copy" / prefix.relative_to(run.folder))
    path.write_bytes(path.read_bytes()[:-2] + b"\1\0")
    refused(["verify", PROSE], "corpus_text_document.bin: its sha256 is")


def refused(arguments, message):
    done = CliRunner().invoke(main, [str(each) for each in arguments])
    assert done.exit_code == 1, done.output
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1
    assert message in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["step", 0], "step 0: the run has the steps 1 to 8"),
        (["step", 9], "step 9: the run has the steps 1 to 8"),
        (["step", 1, "--rank", 4], "--rank 4: the layout has the processes 0 to 3"),
        (["step", 1, "--layout", "data=2"], "--layout: all ranks together read the same"),
        (["step", 1, "--rank", 0, "--layout", "dp=2"], "--layout dp=2: 'dp=2' is none of"),
        (["step", 1, "--rank", 0, "--layout", "data=3"], "do not divide over data = 3"),
        (["step", 1, "--run-config", "none.json"], "none.json: no such file"),
        (["sample", "web", 0], "web: no corpus of this run; it has: code, prose, theirs"),
        (["sample", CODE, 100000], "this split of code has"),
        (["sample", CODE, 0, "--seq-length", 0], "--seq-length 0: must be 1 or more"),
        (["sample", CODE, 0, "--seq-length", 10**6], "has 0 samples of 1000000 tokens"),
        (["corpus", "web"], "web: no corpus of params.yaml; it has: code, prose, theirs"),
        (["corpus", "--picture", "a.svg"], "--picture a.svg: is of one corpus"),
        (["verify", "web"], "web: no corpus of params.yaml"),
        (["verify", "--params", "none.yaml"], "none.yaml"),
    ],
)
def test_mistakes_are_one_clear_error(arguments, message):
    refused(arguments, message)


def test_tokens_of_another_run_are_refused(run, tmp_path):
    text = (run.folder / "outputs/run_config.json").read_text()
    sha256 = TokensManifest.load(run.manifests[CODE]).tokens_sha256
    (tmp_path / "other.json").write_text(text.replace(sha256, "0" * 64))
    for arguments in (["step", 1], ["sample", CODE, 0]):
        refused([*arguments, "--run-config", tmp_path / "other.json"], "not the tokens of the run")
