#!/bin/bash
# The first program of nfs_run's guest: starts the NFS server, mounts it from two clients, runs the command, powers off.
#
# A client is a network namespace with a host name of its own: to the server, and to the kernel's caches, two machines.
# Everything is mounted in the guest alone; of the real file tree only this script's folder is written to.

export PATH=/usr/sbin:/usr/bin:/sbin:/bin
work=${0%/init}
run=/run/hpdcp
server=10.77.0.1

power_off() {
    sync
    sleep 0.3 # for the last output to leave the console
    echo o > /proc/sysrq-trigger
    sleep 60
}

fail() {
    echo "nfs_run: $*" > /dev/tty2
    echo 125 > "$work/status"
    power_off
}

on_client_b() { nsenter --net=$run/net --uts=$run/uts "$@"; }

mount_nfs() { # MOUNT_COMMAND_PREFIX... -- OPTIONS SOURCE FOLDER
    local prefix=()
    while [ "$1" != -- ]; do prefix+=("$1"); shift; done
    shift
    mkdir -p "$3"
    for _ in 1 2 3 4 5 6 7 8 9 10; do
        "${prefix[@]}" mount -t nfs -o "$1" "$2" "$3" && return
        sleep 1
    done
    fail "cannot mount $2 with $1"
}

cd /
mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t tmpfs tmpfs /run
mountpoint -q /dev || mount -t devtmpfs dev /dev
mkdir -p /dev/pts /dev/shm
mount -t devpts devpts /dev/pts
mount -t tmpfs shm /dev/shm
exec < /dev/null
stty -F /dev/tty1 raw -echo
stty -F /dev/tty2 raw -echo

hostname nfs-a
ip link set lo up
mkdir -p $run/srv/main $run/srv/small /run/rpcbind
printf '127.0.0.1 localhost nfs-a\n10.77.0.2 nfs-b\n' > $run/hosts
mount --bind $run/hosts /etc/hosts

modules=$run/modules/lib/modules
mkdir -p $modules
ln -s "/usr/lib/uml/modules/$(uname -r)" "$modules/$(uname -r)"
for module in nfsd nfsv4 nfsv3 veth; do
    modprobe -d $run/modules $module || fail "no kernel module $module"
done

touch $run/net $run/uts
unshare --net=$run/net --uts=$run/uts sh -c 'hostname nfs-b; ip link set lo up'
ip link add to-b mtu 9000 type veth peer name to-a mtu 9000 &&
    ip address add $server/24 dev to-b && ip link set to-b up && ip link set to-a netns $run/net &&
    on_client_b sh -c 'ip address add 10.77.0.2/24 dev to-a; ip link set to-a up' || fail "no second network namespace"

mount -t ext4 /dev/ubda $run/srv/main && mount -t ext4 /dev/ubdb $run/srv/small || fail "cannot mount the images"
chmod 1777 $run/srv/main $run/srv/small
mount -t tmpfs state /var/lib/nfs
mkdir -p /var/lib/nfs/{rpc_pipefs,sm,sm.bak,v4recovery,nfsdcltrack}
touch /var/lib/nfs/{etab,rmtab,state}
mount -t rpc_pipefs rpc_pipefs /var/lib/nfs/rpc_pipefs
mount -t nfsd nfsd /proc/fs/nfsd
rpcbind || fail "rpcbind did not start"
# Clients of a server that was stopped get their files back after this many seconds.
echo 10 > /proc/fs/nfsd/nfsv4leasetime
echo 10 > /proc/fs/nfsd/nfsv4gracetime
number=0
for folder in srv srv/main srv/small; do
    for clients in 127.0.0.0/8 10.77.0.0/24; do
        exportfs -o rw,sync,no_root_squash,no_subtree_check,insecure,fsid=$number $clients:$run/$folder ||
            fail "cannot export $folder"
    done
    number=$((number + 1))
done
rpc.mountd && rpc.nfsd 4 || fail "the NFS server did not start"
echo Y > /proc/fs/nfsd/v4_end_grace

options=$(cat "$work/options")
mount_nfs -- "vers=4.2,$options" 127.0.0.1:/main $run/a
mount_nfs -- "vers=4.2,$options" 127.0.0.1:/small $run/small
mount_nfs -- "vers=3,nolock,proto=tcp,$options" 127.0.0.1:$run/srv/main $run/a3
mount_nfs on_client_b -- "vers=4.2,$options" $server:/main $run/b
mount_nfs on_client_b -- "vers=3,nolock,proto=tcp,$options" $server:$run/srv/main $run/b3
echo "up after $(cut -d' ' -f1 /proc/uptime) s, kernel $(uname -r)"

(
    . "$work/environment"
    export PATH=$PATH:/usr/sbin:/sbin GLOO_SOCKET_IFNAME=lo TP_SOCKET_IFNAME=lo
    export HPDCP_TEST_NFS_A=$run/a HPDCP_TEST_NFS_B=$run/b HPDCP_TEST_NFS_A3=$run/a3 HPDCP_TEST_NFS_B3=$run/b3
    export HPDCP_TEST_NFS_SMALL=$run/small HPDCP_TEST_NFS_EXPORT=$run/srv/main HPDCP_TEST_NFS_B_LINK=to-b
    . "$work/command"
) > /dev/tty1 2> /dev/tty2
echo $? > "$work/status"
power_off
