#!/bin/bash
# The matrix of tests/distributed/dcp_stores.py on two ranks, each on an NFS client of its own; runs inside nfs_run:
#
#     tests/services/nfs_run -- tests/nfs/matrix.sh PYTHON [PYTEST_ARGUMENT...]
#
# The clients' mounts have different paths, but a checkpoint has one name on all ranks. So each rank gets a mount
# namespace, in which its client's mount stands at the same path as the other's in the other. The ranks are started
# without torchrun, which would import torch a third time: some 20 s of the guest's one CPU.
set -u
python=$1
shift
export HPDCP_TEST_STORE_URL=/run/hpdcp/store/matrix HPDCP_TEST_STORE_BROADCASTS=0 HPDCP_TEST_PATIENCE=4
export WORLD_SIZE=2 LOCAL_WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=29400 OMP_NUM_THREADS=1
export PYTHONPATH=.:backends PYTHONUNBUFFERED=1 TORCH_CPP_LOG_LEVEL=ERROR
mkdir -p /run/hpdcp/store "$HPDCP_TEST_NFS_A/matrix"

rank() { # NUMBER MOUNT PYTEST_ARGUMENT...
    local number=$1 mount=$2
    shift 2
    RANK=$number LOCAL_RANK=$number exec unshare --mount sh -c \
        'mount --bind "$1" /run/hpdcp/store && shift && exec "$@"' sh "$mount" \
        "$python" -m pytest -q -s -p no:cacheprovider -o faulthandler_timeout=150 tests/distributed/dcp_stores.py "$@"
}

(rank 1 "$HPDCP_TEST_NFS_B" "$@") > /run/hpdcp/rank1 2>&1 &
second=$!
(rank 0 "$HPDCP_TEST_NFS_A" "$@") &
first=$!
# Ranks tell one another of tests that fail. One that ends without a word would leave the other waiting.
wait -n $first $second || { sleep 15; kill -KILL $first $second 2> /dev/null; }
wait $first
status=$?
wait $second && [ $status -eq 0 ] && exit
echo "--- rank 1:"
cat /run/hpdcp/rank1
exit 1
