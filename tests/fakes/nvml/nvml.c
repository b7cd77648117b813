/*
 * A libnvidia-ml.so.1 without a card: the ABI that nvidia-ml-py calls, answered from a state file.
 *
 * The file is named by FAKE_NVML_STATE and read on every call, so a test or a fake engine may rewrite it at any time
 * (by renaming a complete file into place). Its lines, leading blanks ignored:
 *
 *   driver TEXT                      driver version
 *   fail FUNCTION CODE               FUNCTION returns CODE; before the first "device" for all, after it for that device
 *   device                           begins a card
 *   name TEXT / uuid TEXT / pci TEXT / capability MAJOR MINOR
 *   link MAX_GENERATION MAX_WIDTH GENERATION WIDTH
 *   mig CURRENT PENDING              not supported without this line
 *   lost                             the card has fallen off the bus: every call for it fails, until this line has gone
 *                                    and the library has been shut down and initialised again
 *   total BYTES / reserved BYTES / other BYTES    "other": used by nobody in particular
 *   growing BYTES                    others take as much more of it every 90 ms, 16 times, and then begin anew
 *   used BYTES / free BYTES          instead of the sums below (for absurd figures)
 *   utilisation GPU MEMORY / temperature CELSIUS / power MILLIWATT
 *   xid NUMBER SERIAL                an error; each serial is told once to every event set that is registered before it
 *                                    appears, and to no other
 *   recovery ACTION                  what the driver asks for; not supported without this line
 *   process KIND PID BYTES           KIND c or g; BYTES or "na" where the driver does not tell
 *   process KIND PID BYTES alive HOLD_MS
 *                                    counts only while PID runs, and for HOLD_MS after its end was first noticed
 *
 * used = other + processes, free = total - reserved - used; version 1 counts reserved as used.
 * The structures follow the published ABI (sizes and order of fields); nothing here comes from NVIDIA.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum {
    SUCCESS = 0, UNINITIALIZED = 1, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, INSUFFICIENT_SIZE = 7,
    TIMEOUT = 10, GPU_IS_LOST = 15, UNKNOWN = 999
};
enum { MAX_XIDS = 32, MAX_SETS = 64 };
enum { MAX_ROWS = 256, MAX_DEVICES = 8, MAX_PROCESSES = 64, MAX_FAILURES = 32, TEXT = 96 };
#define NOT_AVAILABLE (~0ULL)

typedef unsigned long long u64;

struct process { char kind; unsigned pid; u64 bytes; };
struct failure { char function[TEXT]; int code; };
struct failures { int count; struct failure list[MAX_FAILURES]; };
struct device {
    char name[TEXT], uuid[TEXT], pci[TEXT];
    int major, minor, has_used, has_free, has_mig, lost, process_count, has_recovery, xid_count;
    unsigned recovery;
    struct { u64 number, serial; } xids[MAX_XIDS];
    unsigned link[4], mig[2];
    unsigned gpu_load, memory_load, temperature, power;
    u64 total, reserved, other, growing, used, free;
    struct process processes[MAX_PROCESSES];
    struct failures failures;
};
struct state { char driver[TEXT]; int device_count; struct device devices[MAX_DEVICES]; struct failures failures; };

struct nvml_memory { u64 total, free, used; };
struct nvml_memory_v2 { unsigned version; u64 total, reserved, free, used; };
struct nvml_process { unsigned pid; u64 used; unsigned gpu_instance, compute_instance; };
struct nvml_utilisation { unsigned gpu, memory; };
struct nvml_pci {
    char legacy_bus_id[16];
    unsigned domain, bus, device, pci_device_id, pci_subsystem_id;
    char bus_id[32];
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static int references;
/* Handles are addresses in a row of these; they mean the index only. Each initialisation has a row of its own, and
   handles of another are refused. */
static char rows[MAX_ROWS][MAX_DEVICES], *handles = rows[0];
static int row;
/* UUIDs of cards that this initialisation of the library has lost for good. */
static char lost[MAX_DEVICES][TEXT];
static int lost_count;

static u64 now_ms(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (u64)now.tv_sec * 1000 + (u64)now.tv_nsec / 1000000;
}

/* A zombie has given its memory back already. */
static int runs(unsigned pid)
{
    char path[64], line[512];
    snprintf(path, sizeof path, "/proc/%u/stat", pid);
    FILE *file = fopen(path, "r");
    if (!file)
        return 0;
    size_t length = fread(line, 1, sizeof line - 1, file);
    fclose(file);
    line[length] = 0;
    const char *end = strrchr(line, ')');
    return end && end[1] == ' ' && end[2] != 'Z' && end[2] != 'X';
}

/* Whether memory of a process that ended is still claimed; the clock starts when the end is first noticed. */
static int held(unsigned pid, u64 hold_ms)
{
    static struct { unsigned pid; u64 noticed; } ended[MAX_PROCESSES];
    static int count;
    for (int i = 0; i < count; i++)
        if (ended[i].pid == pid)
            return now_ms() - ended[i].noticed < hold_ms;
    if (hold_ms && count < MAX_PROCESSES) {
        ended[count].pid = pid;
        ended[count].noticed = now_ms();
        count++;
    }
    return hold_ms > 0;
}

static void add_process(struct device *device, const char *rest)
{
    char kind, bytes[32], mode[16] = "";
    unsigned pid;
    u64 hold_ms = 0;
    if (sscanf(rest, " %c %u %31s %15s %llu", &kind, &pid, bytes, mode, &hold_ms) < 3)
        return;
    if (strcmp(mode, "alive") == 0 && !runs(pid) && !held(pid, hold_ms))
        return;
    if (device->process_count == MAX_PROCESSES)
        return;
    struct process *process = &device->processes[device->process_count++];
    process->kind = kind;
    process->pid = pid;
    process->bytes = strcmp(bytes, "na") == 0 ? NOT_AVAILABLE : strtoull(bytes, NULL, 10);
}

static void copy_text(char *to, const char *from)
{
    snprintf(to, TEXT, "%s", from);
}

static void read_line(struct state *state, char *line)
{
    line += strspn(line, " \t");
    line[strcspn(line, "\r\n")] = 0;
    char *rest = line + strcspn(line, " ");
    if (*rest)
        *rest++ = 0;
    struct device *device = state->device_count ? &state->devices[state->device_count - 1] : NULL;
    struct failures *failures = device ? &device->failures : &state->failures;
    if (strcmp(line, "driver") == 0)
        copy_text(state->driver, rest);
    else if (strcmp(line, "device") == 0 && state->device_count < MAX_DEVICES)
        state->device_count++;
    else if (strcmp(line, "fail") == 0 && failures->count < MAX_FAILURES) {
        struct failure *failure = &failures->list[failures->count];
        if (sscanf(rest, "%95s %d", failure->function, &failure->code) == 2)
            failures->count++;
    } else if (!device)
        return;
    else if (strcmp(line, "name") == 0)
        copy_text(device->name, rest);
    else if (strcmp(line, "uuid") == 0)
        copy_text(device->uuid, rest);
    else if (strcmp(line, "pci") == 0)
        copy_text(device->pci, rest);
    else if (strcmp(line, "capability") == 0)
        sscanf(rest, "%d %d", &device->major, &device->minor);
    else if (strcmp(line, "link") == 0)
        sscanf(rest, "%u %u %u %u", &device->link[0], &device->link[1], &device->link[2], &device->link[3]);
    else if (strcmp(line, "mig") == 0)
        device->has_mig = sscanf(rest, "%u %u", &device->mig[0], &device->mig[1]) == 2;
    else if (strcmp(line, "lost") == 0)
        device->lost = 1;
    else if (strcmp(line, "total") == 0)
        device->total = strtoull(rest, NULL, 10);
    else if (strcmp(line, "reserved") == 0)
        device->reserved = strtoull(rest, NULL, 10);
    else if (strcmp(line, "other") == 0)
        device->other = strtoull(rest, NULL, 10);
    else if (strcmp(line, "growing") == 0)
        device->growing = strtoull(rest, NULL, 10);
    else if (strcmp(line, "used") == 0)
        device->used = strtoull(rest, NULL, 10), device->has_used = 1;
    else if (strcmp(line, "free") == 0)
        device->free = strtoull(rest, NULL, 10), device->has_free = 1;
    else if (strcmp(line, "utilisation") == 0)
        sscanf(rest, "%u %u", &device->gpu_load, &device->memory_load);
    else if (strcmp(line, "temperature") == 0)
        sscanf(rest, "%u", &device->temperature);
    else if (strcmp(line, "power") == 0)
        sscanf(rest, "%u", &device->power);
    else if (strcmp(line, "recovery") == 0)
        device->has_recovery = sscanf(rest, "%u", &device->recovery) == 1;
    else if (strcmp(line, "xid") == 0 && device->xid_count < MAX_XIDS) {
        if (sscanf(rest, "%llu %llu", &device->xids[device->xid_count].number,
                   &device->xids[device->xid_count].serial) == 2)
            device->xid_count++;
    } else if (strcmp(line, "process") == 0)
        add_process(device, rest);
}

static void add_up(struct device *device)
{
    if (!device->has_used) {
        device->used = device->other + device->growing * (now_ms() / 90 % 16);
        for (int i = 0; i < device->process_count; i++)
            if (device->processes[i].bytes != NOT_AVAILABLE)
                device->used += device->processes[i].bytes;
    }
    u64 gone = device->reserved + device->used;
    if (!device->has_free)
        device->free = gone < device->total ? device->total - gone : 0;
}

static int load(struct state *state)
{
    memset(state, 0, sizeof *state);
    const char *path = getenv("FAKE_NVML_STATE");
    FILE *file = path ? fopen(path, "r") : NULL;
    if (!file)
        return UNKNOWN;
    char *line = NULL;
    size_t capacity = 0;
    while (getline(&line, &capacity, file) != -1)
        read_line(state, line);
    free(line);
    fclose(file);
    for (int i = 0; i < state->device_count; i++)
        add_up(&state->devices[i]);
    return SUCCESS;
}

static int demanded(const struct failures *failures, const char *function)
{
    for (int i = 0; i < failures->count; i++)
        if (strcmp(failures->list[i].function, function) == 0)
            return failures->list[i].code;
    return SUCCESS;
}

/* Whether a card is lost, now or since a moment of this initialisation. */
static int is_lost(const struct device *device)
{
    int found = 0;
    pthread_mutex_lock(&lock);
    for (int i = 0; i < lost_count; i++)
        found |= strcmp(lost[i], device->uuid) == 0;
    if (device->lost && !found && lost_count < MAX_DEVICES)
        copy_text(lost[lost_count++], device->uuid);
    pthread_mutex_unlock(&lock);
    return found || device->lost;
}

/* Every call: read the state, then the failure demanded for the library or the device. */
static int enter(struct state *state, const char *function, const void *handle, struct device **device)
{
    int code = UNINITIALIZED;
    pthread_mutex_lock(&lock);
    if (references > 0)
        code = load(state);
    pthread_mutex_unlock(&lock);
    if (code != SUCCESS || (code = demanded(&state->failures, function)) != SUCCESS)
        return code;
    if (!device)
        return SUCCESS;
    const char *slot = handle;
    if (slot < handles || slot >= handles + state->device_count)
        return INVALID_ARGUMENT;
    *device = &state->devices[slot - handles];
    if (is_lost(*device))
        return GPU_IS_LOST;
    return demanded(&(*device)->failures, function);
}

#define ENTER(handle)                                                        \
    static __thread struct state state;                                      \
    struct device *device = NULL;                                            \
    int code = enter(&state, __func__, handle, &device);                     \
    if (code != SUCCESS)                                                     \
        return code
#define ENTER_LIBRARY()                                                      \
    static __thread struct state state;                                      \
    int code = enter(&state, __func__, NULL, NULL);                          \
    if (code != SUCCESS)                                                     \
        return code

static int give_text(char *to, unsigned length, const char *text)
{
    if (strlen(text) >= length)
        return INSUFFICIENT_SIZE;
    strcpy(to, text);
    return SUCCESS;
}

static int start(void)
{
    static struct state state;
    pthread_mutex_lock(&lock);
    int code = load(&state);
    /* One name for both spellings of the call. */
    if (code == SUCCESS)
        code = demanded(&state.failures, "nvmlInit");
    if (code == SUCCESS && references++ == 0)
        handles = rows[row = (row + 1) % MAX_ROWS];
    pthread_mutex_unlock(&lock);
    return code;
}

int nvmlInit_v2(void) { return start(); }
int nvmlInitWithFlags(unsigned flags) { (void)flags; return start(); }

int nvmlShutdown(void)
{
    pthread_mutex_lock(&lock);
    int code = references > 0 ? SUCCESS : UNINITIALIZED;
    if (code == SUCCESS && --references == 0)
        lost_count = 0;
    pthread_mutex_unlock(&lock);
    return code;
}

const char *nvmlErrorString(int code)
{
    switch (code) {
    case 0: return "Success";
    case 1: return "Uninitialized";
    case 2: return "Invalid Argument";
    case 3: return "Not Supported";
    case 4: return "Insufficient Permissions";
    case 6: return "Not Found";
    case 7: return "Insufficient Size";
    case 9: return "Driver Not Loaded";
    case 10: return "Timeout";
    case 12: return "NVML Shared Library Not Found";
    case 13: return "Function Not Found";
    case 15: return "GPU is lost";
    case 18: return "Driver/library version mismatch";
    case 25: return "Argument version mismatch";
    case 28: return "GPU not found";
    default: return "Unknown Error";
    }
}

int nvmlSystemGetDriverVersion(char *version, unsigned length)
{
    ENTER_LIBRARY();
    return give_text(version, length, state.driver);
}

int nvmlDeviceGetCount_v2(unsigned *count)
{
    ENTER_LIBRARY();
    *count = (unsigned)state.device_count;
    return SUCCESS;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **handle)
{
    ENTER_LIBRARY();
    if (index >= (unsigned)state.device_count)
        return INVALID_ARGUMENT;
    if (is_lost(&state.devices[index]))
        return GPU_IS_LOST;
    *handle = &handles[index];
    return demanded(&state.devices[index].failures, __func__);
}

int nvmlDeviceGetHandleByUUID(const char *uuid, void **handle)
{
    ENTER_LIBRARY();
    for (int i = 0; i < state.device_count; i++)
        if (strcmp(state.devices[i].uuid, uuid) == 0) {
            if (is_lost(&state.devices[i]))
                return GPU_IS_LOST;
            *handle = &handles[i];
            return demanded(&state.devices[i].failures, __func__);
        }
    return NOT_FOUND;
}

int nvmlDeviceGetName(void *handle, char *name, unsigned length)
{
    ENTER(handle);
    return give_text(name, length, device->name);
}

int nvmlDeviceGetUUID(void *handle, char *uuid, unsigned length)
{
    ENTER(handle);
    return give_text(uuid, length, device->uuid);
}

int nvmlDeviceGetPciInfo_v3(void *handle, struct nvml_pci *pci)
{
    ENTER(handle);
    memset(pci, 0, sizeof *pci);
    sscanf(device->pci, "%x:%x:%x", &pci->domain, &pci->bus, &pci->device);
    snprintf(pci->bus_id, sizeof pci->bus_id, "%08X:%02X:%02X.0", pci->domain, pci->bus, pci->device);
    snprintf(pci->legacy_bus_id, sizeof pci->legacy_bus_id, "%04X:%02X:%02X.0", pci->domain & 0xffff, pci->bus & 0xff,
             pci->device & 0xff);
    return SUCCESS;
}

int nvmlDeviceGetCudaComputeCapability(void *handle, int *major, int *minor)
{
    ENTER(handle);
    *major = device->major;
    *minor = device->minor;
    return SUCCESS;
}

int nvmlDeviceGetMaxPcieLinkGeneration(void *handle, unsigned *generation)
{
    ENTER(handle);
    *generation = device->link[0];
    return SUCCESS;
}

int nvmlDeviceGetMaxPcieLinkWidth(void *handle, unsigned *width)
{
    ENTER(handle);
    *width = device->link[1];
    return SUCCESS;
}

int nvmlDeviceGetCurrPcieLinkGeneration(void *handle, unsigned *generation)
{
    ENTER(handle);
    *generation = device->link[2];
    return SUCCESS;
}

int nvmlDeviceGetCurrPcieLinkWidth(void *handle, unsigned *width)
{
    ENTER(handle);
    *width = device->link[3];
    return SUCCESS;
}

int nvmlDeviceGetMigMode(void *handle, unsigned *current, unsigned *pending)
{
    ENTER(handle);
    if (!device->has_mig)
        return NOT_SUPPORTED;
    *current = device->mig[0];
    *pending = device->mig[1];
    return SUCCESS;
}

int nvmlDeviceGetMemoryInfo(void *handle, struct nvml_memory *memory)
{
    ENTER(handle);
    memory->total = device->total;
    memory->free = device->free;
    memory->used = device->has_used ? device->used : device->used + device->reserved;
    return SUCCESS;
}

int nvmlDeviceGetMemoryInfo_v2(void *handle, struct nvml_memory_v2 *memory)
{
    ENTER(handle);
    if (memory->version != (sizeof *memory | 2u << 24))
        return 25;
    memory->total = device->total;
    memory->reserved = device->reserved;
    memory->free = device->free;
    memory->used = device->used;
    return SUCCESS;
}

static int give_processes(const struct device *device, char kind, unsigned *count, struct nvml_process *rows)
{
    unsigned found = 0;
    for (int i = 0; i < device->process_count; i++) {
        if (device->processes[i].kind != kind)
            continue;
        if (rows && found < *count)
            rows[found] = (struct nvml_process){device->processes[i].pid, device->processes[i].bytes, ~0u, ~0u};
        found++;
    }
    unsigned room = rows ? *count : 0;
    *count = found;
    return found > room ? INSUFFICIENT_SIZE : SUCCESS;
}

int nvmlDeviceGetComputeRunningProcesses_v2(void *handle, unsigned *count, struct nvml_process *rows)
{
    ENTER(handle);
    return give_processes(device, 'c', count, rows);
}

int nvmlDeviceGetComputeRunningProcesses_v3(void *handle, unsigned *count, struct nvml_process *rows)
{
    ENTER(handle);
    return give_processes(device, 'c', count, rows);
}

int nvmlDeviceGetGraphicsRunningProcesses_v3(void *handle, unsigned *count, struct nvml_process *rows)
{
    ENTER(handle);
    return give_processes(device, 'g', count, rows);
}

int nvmlDeviceGetUtilizationRates(void *handle, struct nvml_utilisation *utilisation)
{
    ENTER(handle);
    utilisation->gpu = device->gpu_load;
    utilisation->memory = device->memory_load;
    return SUCCESS;
}

int nvmlDeviceGetTemperature(void *handle, int sensor, unsigned *celsius)
{
    ENTER(handle);
    if (sensor != 0)
        return INVALID_ARGUMENT;
    *celsius = device->temperature;
    return SUCCESS;
}

int nvmlDeviceGetPowerUsage(void *handle, unsigned *milliwatt)
{
    ENTER(handle);
    *milliwatt = device->power;
    return SUCCESS;
}

/* Events. A set remembers the last serial of each card that it has told, or that was there when it was registered. */
struct event { void *device; u64 type, data; unsigned gpu_instance, compute_instance; };
struct field { unsigned id, scope; long long timestamp, latency_us; int type, code; union { unsigned ui; u64 ull; } value; };
static struct event_set { int used, generation, registered[MAX_DEVICES]; u64 told[MAX_DEVICES]; } sets[MAX_SETS];

static u64 last_serial(const struct device *device)
{
    u64 last = 0;
    for (int i = 0; i < device->xid_count; i++)
        if (device->xids[i].serial > last)
            last = device->xids[i].serial;
    return last;
}

static struct event_set *set_of(void *handle)
{
    struct event_set *set = handle;
    return set >= sets && set < sets + MAX_SETS && set->used && set->generation == row ? set : NULL;
}

int nvmlEventSetCreate(void **handle)
{
    ENTER_LIBRARY();
    for (int i = 0; i < MAX_SETS; i++)
        if (!sets[i].used || sets[i].generation != row) {
            memset(&sets[i], 0, sizeof sets[i]);
            sets[i].used = 1;
            sets[i].generation = row;
            *handle = &sets[i];
            return SUCCESS;
        }
    return UNKNOWN;
}

int nvmlDeviceRegisterEvents(void *handle, u64 types, void *set_handle)
{
    ENTER(handle);
    struct event_set *set = set_of(set_handle);
    if (!set || types != 8)
        return INVALID_ARGUMENT;
    set->registered[device - state.devices] = 1;
    set->told[device - state.devices] = last_serial(device);
    return SUCCESS;
}

/* Never waits: whoever asks with a time gets "Timeout" at once. */
int nvmlEventSetWait_v2(void *set_handle, struct event *event, unsigned timeout_ms)
{
    ENTER_LIBRARY();
    struct event_set *set = set_of(set_handle);
    (void)timeout_ms;
    if (!set)
        return INVALID_ARGUMENT;
    for (int i = 0; i < state.device_count; i++)
        for (int k = 0; set->registered[i] && k < state.devices[i].xid_count; k++)
            if (state.devices[i].xids[k].serial > set->told[i]) {
                set->told[i] = state.devices[i].xids[k].serial;
                *event = (struct event){&handles[i], 8, state.devices[i].xids[k].number, ~0u, ~0u};
                return SUCCESS;
            }
    return TIMEOUT;
}

int nvmlEventSetFree(void *set_handle)
{
    ENTER_LIBRARY();
    struct event_set *set = set_of(set_handle);
    if (!set)
        return INVALID_ARGUMENT;
    set->used = 0;
    return SUCCESS;
}

int nvmlDeviceGetFieldValues(void *handle, int count, struct field *fields)
{
    ENTER(handle);
    for (int i = 0; i < count; i++) {
        fields[i].code = fields[i].id == 230 && device->has_recovery ? SUCCESS : NOT_SUPPORTED;
        fields[i].type = 1;
        fields[i].value.ull = device->recovery;
    }
    return SUCCESS;
}
