"""Following shell text: bash itself is the truth for words, values and branches."""

import contextlib
import shutil
import subprocess

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from lib.errors import UserError
from lib.plan.megatron_script import read_launch
from lib.plan.shell_expansion import Environment, arithmetic
from lib.plan.shell_script import follow_script

needs_bash = pytest.mark.skipif(shutil.which("bash") is None, reason="bash is the truth here")


def in_bash(script: str) -> list[list[str]]:
    """The words of each command ``show`` when bash runs a script, in a bare environment."""
    define = "show() { printf '%s\\x1f' \"$@\"; printf '\\x1e'; }\n"
    done = subprocess.run(
        ["bash", "-f", "-c", define + script], capture_output=True, check=True, env={}, timeout=20
    )
    return [call.split("\x1f")[:-1] for call in done.stdout.decode().split("\x1e")[:-1]]


def here(script: str) -> list[list[str]]:
    """The same words as this project follows them."""
    commands = follow_script(script, {}).commands
    return [list(command.words[1:]) for command in commands if command.words[0] == "show"]


SCRIPTS = {
    "quotes": r"""A='one  two'
B="x $A 'y' \"z\" \$A \\ "
show $A "$A" '$A' "$B" a"b c"'d e'\ f""",
    "continuations": 'show --a 1 \\\n  --b 2 \\\n --c="3 \\\n4"\nshow next',
    "comments": "show a#b # c\n# show d\nshow '#e' \"# f\"",
    "arrays": 'A=(--a 1\n  # no\n --b "2 3")\nA+=(--c)\nB=("${A[@]}" "x y")\nshow ${A[@]} '
    '"${B[@]}" ${#B[@]} ${A[1]} "${A[*]}"',
    "empty": 'E=\nA=()\nshow $E "$E" ${A[@]} "${A[@]}" end',
    "defaults": 'X=1\nshow ${X:-2} ${Y:-2} ${Y-"a b"} "${Y:-"a b"}" ${X:+set} ${Y:+set} ${Z:=7} $Z',
    "appended": 'O=" --a 1 "\nO+="--b"\nO="$O --c ${O}"\nshow $O',
    "sums": "N=4 G=8\nshow $((N*G)) $(($N * 3 / 2 - 1)) $((-7/2)) "
    "$((-7%3)) $(( (N+1) ** 2 )) $((N>3 && G<3))",
    "trimmed": "F=/a/b.c.json\nshow ${F##*/} ${F%.*} ${F%%.*} ${F#*/} ${F/b/x} ${#F}",
    "if": 'T=true N=3\nif [ "$T" = "true" ] && [ $N -gt 2 ]; then show yes; else show no; fi\n'
    "if [[ $T == f* || -z $N ]]; then show a; elif (( N == 3 )); then show b; else show c; fi\n"
    '[ -n "$U" ] && show u\n[[ ! $N -lt 3 ]] || show v\nif ! [ $T != x ]; then show w; fi',
    "case": 'M=8B\ncase "$M" in\n 1B|2B) L=1 ;;\n "8B") L=2\n show in ;;\n '
    "*) L=3 ;;\nesac\nshow $L",
    "function": 'f() { local A=$1; show f $A "$2"; }\nfunction g { f x "y z"; }\ng\nf 1 2',
    "eval": 'C="show --a \'b c\' \\$D"\nD="d e"\neval $C\nbash_like=1',
    "groups": "{ A=1; show $A; }\n( show sub )\nshow end | cat\ntrue && show t; false || show u",
    "heredoc": 'cat <<EOF > /dev/null\nshow never\n"\nEOF\nshow after',
    "declare": 'export A=1 B="2 3"\ndeclare C=4\nA=5 show $A "$B" $C',
    "named": 'declare -A L=([7b]=32 ["1 b"]=16)\nM=7b\nL[13b]=40\nL[7b]=31 N=(x y)\nN[1]=z\n'
    "P=(u)\nP[1]=w\n"
    'show ${L[$M]} "${L[1 b]}" ${L[13b]} ${N[0]} ${N[1]} "${P[@]}" ${#P[@]}',
    "braces": "for I in {0..11} {08..10} {2..-1} x{a,b}y{1..2}; do show $I; done\n"
    "show {a} '{1..3}' \"{a,b}\" ${H:-{1..2}} a{,b} {1..x} --d=/p/{a,b}_t",
    "loops": """S=
for I in a b c; do [ $I = b ] && continue; S="$S $I"; done; show $S
N=0; while true; do N=$((N+1)); if (( N == 4 )); then break; fi; show $N; done
until [ $N -le 2 ]; do N=$((N-1)); for J in 1 2; do show $N $J; break; done; done
for I in; do show never; done; while [ $N -gt 99 ]; do show never; done; show $I $N""",
    "positions": """f() { show $# "$@"; for A in "$@"; do show "$A"; done
 while [[ $# -gt 0 ]]; do case $1 in --k) V=$2; shift; shift;; *) shift;; esac; done
 show "$V" $#; }
f --k 'x y' z; f; g() { show "$*" $1; f "$@" h; show "$1"; }; g 1 2; show $#""",
    "pieces": "T=1_000_000 A=abcdef\nshow ${T//_} ${T/_/-} ${A:2} ${A:1:3} ${A: -2} "
    "${A:1+1:$((9-8))}",
    "conditional": "N=3\nshow $(( ($N > 1) ? 1 : 0 )) $(( N<2?N+1:N==3?7:8 )) $(( (N?4:5)*2 ))",
    "nested": 'P=x_${Q:-${R:-3}}_y\nshow "${P}" "$(( ${N:-2} * 2 ))"',
}


@needs_bash
@pytest.mark.parametrize("name", SCRIPTS)
def test_words_are_those_of_bash(name: str) -> None:
    expected = in_bash(SCRIPTS[name])
    assert expected, "a script that shows nothing tests nothing"
    if name == "declare":  # a variable before a command holds for that command here
        expected[0][0] = "5"
    assert here(SCRIPTS[name]) == expected


VALUES = st.text(st.sampled_from("ab 1-./'\"\\$#;|&()<>"), max_size=8)


def quoted(value: str) -> str:
    return "'" + value.replace("'", "'\\''") + "'"


@needs_bash
@given(st.lists(VALUES, min_size=1, max_size=4))
def test_any_quoted_text_survives_as_in_bash(values: list[str]) -> None:
    script = "\n".join(f"V{n}={quoted(value)}" for n, value in enumerate(values))
    names = range(len(values))
    script += "\nA=(" + " ".join(f'"$V{n}"' for n in names) + ")\n"
    script += "show " + " ".join(f'"$V{n}" $V{n} pre"${{V{n}}}"post' for n in names)
    script += ' "${A[@]}" ${A[@]}'
    # A value that names what it cannot know, such as <abc>, is kept whole on purpose.
    if "<" not in "".join(values):
        assert here(script) == in_bash(script)


NUMBERS = st.integers(-50, 50)
SUMS = st.recursive(
    NUMBERS.map(lambda n: f"({n})") | st.sampled_from(["0x1f", "017", "08", "00", "0"]),
    lambda inner: (
        st.tuples(st.sampled_from(["+", "-", "~", "!"]), inner).map(
            lambda parts: f"({parts[0]} {parts[1]})"
        )
        | st.tuples(inner, st.sampled_from("+-*/%<>"), inner).map(
            lambda parts: f"({parts[0]} {parts[1]} {parts[2]})"
        )
        | st.tuples(inner, inner, inner).map(
            lambda parts: f"({parts[0]} ? {parts[1]} : {parts[2]})"
        )
    ),
    max_leaves=6,
)


@needs_bash
@given(SUMS)
def test_sums_are_those_of_bash(expression: str) -> None:
    ours = arithmetic(expression, Environment())
    done = subprocess.run(["bash", "-c", f"echo $(( {expression} ))"], capture_output=True)
    theirs = int(done.stdout) if done.returncode == 0 and done.stdout else None
    assert ours == theirs


def test_nothing_is_executed(tmp_path) -> None:
    target = tmp_path / "made"
    script = f"touch {target}\nX=$(touch {target})`touch {target}`\neval 'touch {target}'\n"
    follow_script(script + f'[ "$(touch {target})" ] && touch {target}', {})
    assert not target.exists()


def test_what_only_a_run_knows_stays_visible() -> None:
    script = 'A=$(hostname) B=`date`/x\np.py --a $A --b "$B" --c $NEVER ${6} $((NEVER * 2)) $@'
    (command,) = follow_script(script, {}).commands
    words = ["--a", "$(...)", "--b", "$(...)/x", "--c", "$NEVER", "$6", "$(...)"]
    assert list(command.words[1:]) == words


def test_sums_of_what_is_not_known_or_too_large_are_not_known() -> None:
    environment = Environment({"LOOP": "LOOP"})
    for text in ("NEVER + 1", "LOOP", "2 ** 99", "1 / 0", "9 << 9999", "a.b", "f(1)", "'x' * 9"):
        assert arithmetic(text, environment) is None


@pytest.mark.parametrize("text", ["a 'b", 'a "b', "A=(1 2", "a ${b", "a $(b"])
def test_what_is_never_closed_is_named_with_its_line(text: str) -> None:
    with pytest.raises(UserError, match="line 2: "):
        follow_script(f"x\n{text}\n", {})


@needs_bash
def test_arguments_of_the_script_are_its_positions() -> None:
    script = 'K=a; while [ $# -gt 1 ]; do K=$K-$1; shift; done; show "$K" "$1" $# "$@"'
    done = subprocess.run(
        ["bash", "-c", 'show() { echo "$*"; }; ' + script, "name", "x", "y z", "w"],
        capture_output=True,
        check=True,
    )
    (command,) = follow_script(script, {"1": "x", "2": "y z", "3": "w"}).commands
    assert " ".join(command.words[1:]) == done.stdout.decode().strip()


def test_files_that_a_script_reads_in_are_followed_where_they_are() -> None:
    files = {"sizes.sh": "L=4\nSIZES=(--a $L --b $W)", "broken.sh": "x 'y"}
    script = (
        "W=7\n. `pwd`/sizes.sh\nsource gone.sh\n. broken.sh\ntrain.py ${SIZES[@]} --c $L  # read in"
    )
    launch = read_launch(script, {}, lambda name: files.get(name.rpartition("/")[2]))
    assert [flag.values for flag in launch.flags] == [("4",), ("7",), ("4",)]
    said = "\n".join(launch.notes)
    assert "line 3: the file gone.sh is not beside the script" in said
    assert "line 4: the file broken.sh is not read" in said
    assert "sizes.sh" not in said


def test_a_function_that_calls_itself_ends() -> None:
    follow_script("f() { f; }\nf\nwhile true; do f; done\nfor i in 1 2; do f; done", {})
    follow_script("show {1..9999999999}{1..9999}{1..9999}\nfor i in {1..9999}; do f; done", {})


# ---- the training command


def flags(text: str, **variables: str) -> dict[str, tuple[str, ...]]:
    return {flag.name: flag.values for flag in read_launch(text, variables).flags}


def test_flags_have_values_until_the_next_flag() -> None:
    text = "python t.py --Num_Layers=4 --data-path 0.3 a 0.7 b --bf16 --lr -1e-3 --split '9, 1'"
    assert flags(text) == {
        "num-layers": ("4",),
        "data-path": ("0.3", "a", "0.7", "b"),
        "bf16": (),
        "lr": ("-1e-3",),
        "split": ("9, 1",),
    }


@pytest.mark.parametrize(
    ("text", "world", "nodes"),
    [
        ("torchrun --nproc_per_node 8 --nnodes=2 p.py --a --b --c", 16, 2),
        ("python -m torch.distributed.launch --nproc_per_node=4 p.py --a --b --c", 4, 1),
        ("python -u -m torch.distributed.run --nproc-per-node 4 -m a.b --a --b --c", 4, 1),
        ("deepspeed --num_gpus 8 --num_nodes 2 p.py --a --b --c", 16, 2),
        ("deepspeed p.py --a --b --c", None, 1),
        ("python p.py --a --b --c", 1, 1),
        ("srun --nodes=3 --ntasks-per-node=8 python p.py --a --b --c", 24, 3),
        ("mpirun -np 16 -x A=1 python p.py --a --b --c", 16, 1),
        ("mpiexec -n 6 python p.py --a --b --c", 6, 1),
        ("srun -N 2 -n 16 python -u p.py --a --b --c", 16, 2),
        ("torchrun --nproc_per_node $N p.py --a --b --c", None, 1),
        ("torchrun --nproc_per_node 8 --nnodes $N p.py --a --b --c", None, None),
        ("--a 1 --b 2 --c 3", None, 1),
    ],
)
def test_processes_come_from_the_launcher(text: str, world: int | None, nodes: int | None) -> None:
    launch = read_launch(text, {})
    assert (launch.world_size, launch.nodes) == (world, nodes)
    assert [flag.name for flag in launch.flags] == ["a", "b", "c"]


def test_slurm_says_the_machines_and_bash_c_is_looked_into() -> None:
    script = """#!/bin/bash
#SBATCH --nodes=6     # machines
#SBATCH --gres=gpu:4
ARGS=" --a 1 \\
   --b 2 "
CMD="train.py $ARGS --c 3"
LAUNCH="python -m torch.distributed.run --nproc_per_node $SLURM_GPUS_ON_NODE --nnodes $SLURM_NNODES"
echo $CMD
srun --wait=60 bash -lc "$LAUNCH --node_rank \\$SLURM_PROCID $CMD" 2>&1 | tee log.txt
"""
    launch = read_launch(script, {})
    assert (launch.program, launch.world_size, launch.nodes) == ("train.py", 24, 6)
    assert [flag.name for flag in launch.flags] == ["a", "b", "c"]


def test_the_command_with_most_flags_is_read_and_rivals_are_named() -> None:
    script = (
        "prepare.py --x 1 --y 2 --z 3\ntrain.py --a --b --c --d\necho train.py --q --r --s --t --u"
    )
    launch = read_launch(script, {})
    assert launch.program == "train.py"
    assert any("line 1" in note for note in launch.notes)


def test_a_broken_continuation_is_named_and_read_on() -> None:
    launch = read_launch("train.py --a 1 \\\n  --b 2 --c 3  # \\\n  --d 4 \\\n  --e 5\n", {})
    assert [flag.name for flag in launch.flags] == ["a", "b", "c", "d", "e"]
    assert any("line 3" in note and "backslash" in note for note in launch.notes)


def test_flags_that_no_program_gets_are_found_in_their_variable() -> None:
    launch = read_launch('OTHER=1\nexport ARGS=" --a ${X} --b 2 --c "\n', {"X": "7"})
    assert launch.program is None
    assert [(flag.name, flag.values) for flag in launch.flags] == [
        ("a", ("7",)),
        ("b", ("2",)),
        ("c", ()),
    ]


def test_places_to_fill_in_stay_one_value() -> None:
    text = (
        'D=<Your path and prefix>_text_document\np.py --data-path $D --save "<a b>" --vocab <c d>'
    )
    assert flags(text) == {
        "data-path": ("<Your path and prefix>_text_document",),
        "save": ("<a b>",),
        "vocab": ("<c d>",),
    }


def test_a_text_without_flags_is_refused() -> None:
    with pytest.raises(UserError, match="no flags"):
        read_launch("echo hello\n", {})
    with pytest.raises(UserError, match="<< feeds"):
        read_launch("bash <<EOF\ntrain.py --a --b --c\nEOF\n", {})
    with pytest.raises(UserError, match="it starts real\\.sh"):
        read_launch('bash real.sh "$1" 8\n', {})


def test_an_undecided_branch_with_flags_is_named() -> None:
    launch = read_launch("if [ -f x ]; then A='--d 4'; fi\ntrain.py --a --b --c $A", {})
    assert any("line 1" in note for note in launch.notes)


FRAGMENTS = [
    *(
        "if ",
        "then ",
        "fi\n",
        "else ",
        "[ ",
        "] ",
        "[[ ",
        "]]",
        "\n",
        ";",
        ";;",
        "(",
        ")",
        "{ ",
        "}",
    ),
    *(
        "for x in a b",
        "do ",
        "done ",
        "while ",
        "case $x in",
        "esac ",
        "a) ",
        "f() ",
        "function g ",
    ),
    *("$x", "${x", "$(", "`", '"', "'", "\\", " --a 1 ", "A=", "A+=(", "((1<2))", "&&", "||", "|"),
    *("&", "! ", "#", "<<EOF\n", "EOF\n", ">f ", "<a b>", "$((", "))", "eval ", "bash -c ", "f "),
]


@given(st.lists(st.sampled_from(FRAGMENTS), max_size=15))
@example(["bash -c ", "function g "])
def test_any_text_is_followed_to_its_end_or_refused(fragments: list[str]) -> None:
    with contextlib.suppress(UserError):
        follow_script("".join(fragments), {})
