/* Lets User Mode Linux 6.1 run on processors whose register state outgrew it (AMX: 11,008 bytes instead of 2,696).

   It hands the kernel a buffer of 2,696 bytes to restore; the kernel takes a whole state or none (EFAULT, and the guest
   panics at its first process: "ptrace set fp regs failed, errno = 14"). This library, preloaded, stands in for
   ptrace(): a state on its way to the kernel gets the rest appended as zeros, which means "tiles unused".
   Needs no header and no C library, so that a bare compiler builds it. */

enum { PEEKTEXT = 1, PEEKUSER = 3, GETREGSET = 0x4204, SETREGSET = 0x4205, XSTATE = 0x202, SYS_ptrace = 101 };
enum { LARGEST = 1 << 16, HEADER = 512 };

struct iovec {
    void *base;
    unsigned long length;
};

extern long syscall(long number, ...);

static unsigned char whole[LARGEST] __attribute__((aligned(64)));
static unsigned long whole_length;

static long set_state(long pid, const struct iovec *given)
{
    struct iovec all = {whole, LARGEST};
    unsigned long i;

    if (!whole_length) {
        if (syscall(SYS_ptrace, GETREGSET, pid, XSTATE, &all) < 0)
            return -1;
        whole_length = all.length;
    }
    if (given->length >= whole_length)
        return syscall(SYS_ptrace, SETREGSET, pid, XSTATE, given);
    for (i = 0; i < whole_length; i++)
        whole[i] = i < given->length ? ((unsigned char *)given->base)[i] : 0;
    /* Components 17 and 18 are the tiles; what is not in the buffer must not be announced in its header. */
    whole[HEADER + 2] &= ~0x06;
    all.length = whole_length;
    return syscall(SYS_ptrace, SETREGSET, pid, XSTATE, &all);
}

long ptrace(long request, long pid, void *address, void *data)
{
    long word;

    if (request == SETREGSET && (long)address == XSTATE)
        return set_state(pid, data);
    if (request >= PEEKTEXT && request <= PEEKUSER)
        return syscall(SYS_ptrace, request, pid, address, &word) < 0 ? -1 : word;
    return syscall(SYS_ptrace, request, pid, address, data);
}
