import pytest
from click.testing import CliRunner

from lib.data import shards
from lib.data.indexed_dataset import IndexedDataset, bin_path, idx_path
from lib.data.shards import iter_raw_documents
from lib.data.tokens_manifest import TOKENS_PREFIX
from lib.errors import UserError
from lib.workflow import tokenizing_ways
from lib.workflow.tokenizing_ways import FROM_MEMORY, OURS, WAYS, Job, Outcome, Stretch, measure
from lib.workflow.varied_corpus import write_varied_corpus
from stages import measure_tokenizing
from tests.data.raw_example import write_raw
from tests.data.tiny_tokenizer import TRAINING_TEXT, save_tiny

MEGABYTES = 1.0


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ways")
    write_raw(folder / "source", [TRAINING_TEXT * size for size in range(10, 40)])
    save_tiny(folder / "tokenizer")
    for name in ("raw", "tokens"):
        (folder / name).mkdir()
    job = Job(folder / "raw", folder / "lines", folder / "tokenizer", folder / "tokens", 2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shards, "_FRAME_BYTES", 200_000)
        write_varied_corpus(folder / "source", job.raw, job.lines, int(MEGABYTES * 1e6))
    return job


def test_the_varied_corpus_has_the_size_and_new_words(job):
    texts = [document.text for document in iter_raw_documents(job.raw)]
    size = sum(len(text.encode()) for text in texts)
    assert 0 <= size - MEGABYTES * 1e6 < 40 * len(TRAINING_TEXT.encode())
    assert len(job.lines.read_text(encoding="utf-8").splitlines()) == len(texts)
    assert len(texts) > 70
    assert len(set(texts)) > 0.9 * len(texts)
    assert texts[30] != texts[0]
    assert len(texts[30]) == len(texts[0])


class Recorder:
    """In place of Megatron's builder, whose import takes longer than all the rest."""

    def __init__(self):
        self.documents = []
        self.index = None

    def add_document(self, ids, lengths):
        assert lengths == [len(ids)]
        self.documents.append(ids)

    def finalize(self, path):
        self.index = path


def test_all_ways_work_and_ours_writes_the_tokens_of_megatrons(job, monkeypatch):
    recorder = Recorder()
    monkeypatch.setattr(tokenizing_ways, "_megatron_builder", lambda *_: recorder)
    assert all(way(job) > 0 for way in WAYS.values())
    ours = IndexedDataset(job.output / "drydock" / TOKENS_PREFIX)
    assert [ours[number].tolist() for number in range(len(ours))] == recorder.documents
    assert recorder.index == str(idx_path(job.output / TOKENS_PREFIX))


@pytest.mark.layouts
def test_ours_writes_the_files_of_megatrons_builder(job):
    for way in (OURS, "Megatron's way"):
        assert WAYS[way](job) > 0
    ours, theirs = job.output / "drydock" / TOKENS_PREFIX, job.output / TOKENS_PREFIX
    assert bin_path(ours).read_bytes() == bin_path(theirs).read_bytes()
    assert idx_path(ours).read_bytes() == idx_path(theirs).read_bytes()


def test_a_fresh_process_and_its_memory(job):
    outcome = measure("tokenizers alone", job, memory=True)
    assert outcome.warm > 0
    assert 3e7 < outcome.memory < 3e9
    job.raw.joinpath("manifest.json").rename(job.raw / "away")
    with pytest.raises(UserError, match="manifest"):
        measure(OURS, job, memory=False)
    job.raw.joinpath("away").rename(job.raw / "manifest.json")


def test_the_first_results_are_not_counted():
    stretch = Stretch(2)
    for size in (500, 700):
        stretch.add(size)
    with pytest.raises(UserError, match="megabytes"):
        stretch.speed()
    stretch.add(10**6)
    assert stretch.speed() > 0


def test_the_table():
    """The first outcome is for the memory alone; of the others come medians."""
    slow = [Outcome(1.0, 1.0, 3_000_000), *(Outcome(speed, 20.0, 0) for speed in (4.0, 5.0, 9.0))]
    fast = [Outcome(1.0, 1.0, 9_000_000), *(Outcome(speed, 5.0, 0) for speed in (10.0, 1.0, 90.0))]
    (memory,) = {"tiktoken alone"} & FROM_MEMORY
    outcomes = {OURS: fast, memory: slow, "Megatron's way": slow}
    assert measure_tokenizing.table_rows(outcomes, 100_000_000) == [
        (OURS, "10.0 MB/s", "1.00", "20.0 MB/s", "1.00", "9 MB"),
        (memory, "5.0 MB/s", "2.00", "", "", "3 MB"),
        ("Megatron's way", "5.0 MB/s", "2.00", "5.0 MB/s", "4.00", "3 MB"),
    ]


def test_without_a_corpus_the_command_says_what_to_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "params.yaml").write_text("corpora: {web: {}}\n")
    done = CliRunner().invoke(measure_tokenizing.main, [])
    assert done.exit_code == 1
    assert "dvc repro prepare_tokenizer" in done.stderr
