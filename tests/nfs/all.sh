#!/bin/bash
# Everything that is tested on NFS, in one guest; what each part prints goes to a file of FOLDER, and its exit status:
#
#     tests/services/nfs_run -- tests/nfs/all.sh FOLDER PYTHON
set -u
folder=$1 python=$2

part() { # NAME COMMAND...
    local name=$1
    shift
    "$@" > "$folder/$name" 2>&1
    echo $? > "$folder/$name.status"
}

part suite "$python" -m pytest -q --color=no -p no:cacheprovider tests/nfs/nfs_{contract,freshness,exchange,faults}.py
part matrix tests/nfs/matrix.sh "$python"
