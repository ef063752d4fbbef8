/* A stand-in for NVIDIA's libnvidia-ml.so.1: answers from the file that FLUSTER_STAND_IN_NVML names, read again when it changes.
 *
 * Lines of the file are words divided by spaces; a name has the rest of its line. Those of a device follow its `device`:
 *
 *   init CODE                 what nvmlInit answers, 0 unless given
 *   driver VERSION            such as 580.159.04
 *   cuda NUMBER               such as 13000
 *   nearness A B LEVEL NVLINK of devices A and B: their common ancestor, and 1 where NVLink joins them
 *   device UUID BUS_ID        a device, or with `instance UUID` one of the instances (MIG) of the device before
 *   name TEXT
 *   memory TOTAL RESERVED USED
 *   utilization GPU MEMORY    percent
 *   temperature C | power MILLIWATTS | ecc UNCORRECTED
 *   mig MODE PLACES           1 while it is divided; how many instances it may have
 *   place NUMBER              of an instance; those that are not named follow each other
 *   process c|g PID BYTES     which computes, or draws; 0 bytes: the driver does not tell
 *   fails CALL CODE           what this call answers for the device; CALL `*` is each, `handle` is finding it
 *   hangs CALL                this call for the device never returns
 *
 * What is not given is not supported. Each call that may be made to a device checks first whether it fails or hangs.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum { SUCCESS = 0, UNINITIALIZED = 1, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, INSUFFICIENT_SIZE = 7, FUNCTION_NOT_FOUND = 13 };
enum { MAX_DEVICES = 64, MAX_INSTANCES = 16, MAX_PROCESSES = 64, MAX_RULES = 16, MAX_PAIRS = 256 };
#define MEMORY_V2 0x02000028u

typedef unsigned long long u64;
typedef struct { char kind; unsigned pid; u64 bytes; } Process;
typedef struct { char call[64]; int code; } Rule; /* code -1: hangs */

typedef struct Device {
    char uuid[96], bus_id[32], name[96];
    u64 total, reserved, used, ecc;
    unsigned gpu, memory, temperature, power, mig, places, place;
    int has_name, has_memory, has_utilization, has_temperature, has_power, has_ecc, has_mig, is_instance;
    int process_count, rule_count, instance_count;
    Process processes[MAX_PROCESSES];
    Rule rules[MAX_RULES];
    struct Device *instances[MAX_INSTANCES];
    struct Device *parent;
    unsigned index;
} Device;

typedef struct { unsigned first, second, level, nvlink; } Pair;

static Device devices[MAX_DEVICES], all_instances[MAX_DEVICES * 4];
static Pair pairs[MAX_PAIRS];
static int device_count, instance_total, pair_count, init_code, sessions;
static unsigned cuda;
static char driver[81];
static struct timespec read_at;
static ino_t read_inode;

static void parse_line(char *line, Device **current)
{
    char word[64], a[128], b[64];
    int used = 0;
    u64 x, y, z;
    Device *at = *current;
    line[strcspn(line, "\n")] = 0;
    if (sscanf(line, "%63s %n", word, &used) != 1 || word[0] == '#')
        return;
    char *rest = line + used;
    if (!strcmp(word, "init")) {
        init_code = atoi(rest);
    } else if (!strcmp(word, "driver")) {
        snprintf(driver, sizeof driver, "%s", rest);
    } else if (!strcmp(word, "cuda")) {
        cuda = (unsigned)atoi(rest);
    } else if (!strcmp(word, "nearness") && pair_count < MAX_PAIRS) {
        Pair *pair = &pairs[pair_count];
        if (sscanf(rest, "%u %u %u %u", &pair->first, &pair->second, &pair->level, &pair->nvlink) == 4)
            pair_count++;
    } else if (!strcmp(word, "device") && device_count < MAX_DEVICES) {
        *current = at = &devices[device_count];
        at->index = (unsigned)device_count++;
        sscanf(rest, "%95s %31s", at->uuid, at->bus_id);
    } else if (!strcmp(word, "instance") && device_count && instance_total < MAX_DEVICES * 4) {
        Device *parent = &devices[device_count - 1];
        if (parent->instance_count == MAX_INSTANCES)
            return;
        *current = at = &all_instances[instance_total++];
        at->is_instance = 1;
        at->parent = parent;
        at->place = (unsigned)parent->instance_count;
        parent->instances[parent->instance_count++] = at;
        sscanf(rest, "%95s", at->uuid);
    } else if (!at) {
        return;
    } else if (!strcmp(word, "name")) {
        snprintf(at->name, sizeof at->name, "%s", rest);
        at->has_name = 1;
    } else if (!strcmp(word, "memory")) {
        at->has_memory = sscanf(rest, "%llu %llu %llu", &at->total, &at->reserved, &at->used) == 3;
    } else if (!strcmp(word, "utilization")) {
        at->has_utilization = sscanf(rest, "%u %u", &at->gpu, &at->memory) == 2;
    } else if (!strcmp(word, "temperature")) {
        at->has_temperature = sscanf(rest, "%u", &at->temperature) == 1;
    } else if (!strcmp(word, "power")) {
        at->has_power = sscanf(rest, "%u", &at->power) == 1;
    } else if (!strcmp(word, "ecc")) {
        at->has_ecc = sscanf(rest, "%llu", &at->ecc) == 1;
    } else if (!strcmp(word, "mig")) {
        at->has_mig = sscanf(rest, "%u %u", &at->mig, &at->places) == 2;
    } else if (!strcmp(word, "place")) {
        at->place = (unsigned)atoi(rest);
    } else if (!strcmp(word, "process") && at->process_count < MAX_PROCESSES) {
        if (sscanf(rest, "%7s %llu %llu", b, &x, &y) == 3)
            at->processes[at->process_count++] = (Process){b[0], (unsigned)x, y};
    } else if (!strcmp(word, "fails") && at->rule_count < MAX_RULES) {
        if (sscanf(rest, "%63s %llu", a, &z) == 2) {
            snprintf(at->rules[at->rule_count].call, 64, "%.63s", a);
            at->rules[at->rule_count++].code = (int)z;
        }
    } else if (!strcmp(word, "hangs") && at->rule_count < MAX_RULES) {
        snprintf(at->rules[at->rule_count].call, 64, "%.63s", rest);
        at->rules[at->rule_count++].code = -1;
    }
}

static void refresh(void)
{
    const char *path = getenv("FLUSTER_STAND_IN_NVML");
    struct stat now;
    if (!path || stat(path, &now))
        return;
    if (read_inode == now.st_ino && read_at.tv_sec == now.st_mtim.tv_sec && read_at.tv_nsec == now.st_mtim.tv_nsec)
        return;
    FILE *file = fopen(path, "r");
    if (!file)
        return;
    read_inode = now.st_ino;
    read_at = now.st_mtim;
    memset(devices, 0, sizeof devices);
    memset(all_instances, 0, sizeof all_instances);
    device_count = instance_total = pair_count = init_code = 0;
    cuda = 13000;
    strcpy(driver, "580.159.04");
    char line[512];
    Device *current = NULL;
    while (fgets(line, sizeof line, file))
        parse_line(line, &current);
    fclose(file);
}

/* What a call on a device answers before it answers anything else. */
static int checked(const Device *device, const char *call)
{
    if (!sessions)
        return UNINITIALIZED;
    refresh();
    if (!device)
        return INVALID_ARGUMENT;
    for (const Device *at = device; at; at = at->parent)
        for (int i = 0; i < at->rule_count; i++)
            if (!strcmp(at->rules[i].call, call) || !strcmp(at->rules[i].call, "*")) {
                while (at->rules[i].code < 0)
                    pause();
                return at->rules[i].code;
            }
    return SUCCESS;
}

#define CHECK(call)                         \
    do {                                    \
        int code = checked(device, call);   \
        if (code)                           \
            return code;                    \
    } while (0)

static int fill(char *buffer, unsigned size, const char *text)
{
    if (strlen(text) >= size)
        return INSUFFICIENT_SIZE;
    strcpy(buffer, text);
    return SUCCESS;
}

int nvmlInitWithFlags(unsigned flags)
{
    (void)flags;
    refresh();
    if (init_code)
        return init_code;
    sessions++;
    return SUCCESS;
}

int nvmlInit_v2(void) { return nvmlInitWithFlags(0); }

int nvmlShutdown(void)
{
    if (!sessions)
        return UNINITIALIZED;
    sessions--;
    return SUCCESS;
}

static const char *const ERRORS[] = {
    "Success", "Uninitialized", "Invalid Argument", "Not Supported", "Insufficient Permissions", "Already Initialized",
    "Not Found", "Insufficient Size", "Insufficient External Power", "Driver Not Loaded", "Timeout",
    "Interrupt Request Issue", "NVML Shared Library Not Found", "Function Not Found", "Corrupted infoROM", "GPU is lost",
    "GPU requires reset", "GPU access blocked by the operating system", "Driver/library version mismatch",
    "In use by another client", "Insufficient Memory", "No data", "vGPU ECC not supported", "Insufficient Resources",
    "Invalid Frequency", "Argument version mismatch", "Requested functionality has been deprecated",
    "System is not in ready state", "No supported GPUs were found",
    "Resource not in correct state to perform requested operation", "Reset type is not supported for given device",
};

const char *nvmlErrorString(int code)
{
    return code >= 0 && code < (int)(sizeof ERRORS / sizeof *ERRORS) ? ERRORS[code] : "Unknown Error";
}

static int system_text(char *text, unsigned size, const char *value)
{
    if (!sessions)
        return UNINITIALIZED;
    refresh();
    return fill(text, size, value);
}

int nvmlSystemGetDriverVersion(char *text, unsigned size) { return system_text(text, size, driver); }
int nvmlSystemGetNVMLVersion(char *text, unsigned size) { return system_text(text, size, "13.580.159.04"); }

int nvmlSystemGetCudaDriverVersion_v2(int *version)
{
    refresh();
    *version = (int)cuda;
    return SUCCESS;
}

int nvmlSystemGetCudaDriverVersion(int *version) { return nvmlSystemGetCudaDriverVersion_v2(version); }

int nvmlDeviceGetCount_v2(unsigned *count)
{
    if (!sessions)
        return UNINITIALIZED;
    refresh();
    *count = (unsigned)device_count;
    return SUCCESS;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, Device **found)
{
    if (!sessions)
        return UNINITIALIZED;
    refresh();
    if (index >= (unsigned)device_count)
        return INVALID_ARGUMENT;
    int code = checked(&devices[index], "handle");
    if (!code)
        *found = &devices[index];
    return code;
}

int nvmlDeviceGetHandleByUUID(const char *uuid, Device **found)
{
    if (!sessions)
        return UNINITIALIZED;
    refresh();
    for (int i = 0; i < device_count; i++)
        if (!strcmp(devices[i].uuid, uuid)) {
            *found = &devices[i];
            return checked(&devices[i], "handle");
        }
    for (int i = 0; i < instance_total; i++)
        if (!strcmp(all_instances[i].uuid, uuid)) {
            *found = &all_instances[i];
            return checked(&all_instances[i], "handle");
        }
    return NOT_FOUND;
}

int nvmlDeviceGetIndex(Device *device, unsigned *index)
{
    CHECK("nvmlDeviceGetIndex");
    *index = device->is_instance ? device->place : device->index;
    return SUCCESS;
}

int nvmlDeviceGetUUID(Device *device, char *text, unsigned size)
{
    CHECK("nvmlDeviceGetUUID");
    return fill(text, size, device->uuid);
}

int nvmlDeviceGetName(Device *device, char *text, unsigned size)
{
    CHECK("nvmlDeviceGetName");
    return device->has_name ? fill(text, size, device->name) : NOT_SUPPORTED;
}

typedef struct { char legacy[16]; unsigned domain, bus, device, id, subsystem; char bus_id[32]; } Pci;
enum { H100_ID = 590352606, H100_SUBSYSTEM = 381751518 };

int nvmlDeviceGetPciInfo_v3(Device *device, Pci *pci)
{
    CHECK("nvmlDeviceGetPciInfo");
    memset(pci, 0, sizeof *pci);
    const char *bus_id = device->is_instance ? device->parent->bus_id : device->bus_id;
    snprintf(pci->bus_id, sizeof pci->bus_id, "%s", bus_id);
    snprintf(pci->legacy, sizeof pci->legacy, "%.15s", strlen(bus_id) > 4 ? bus_id + 4 : bus_id);
    sscanf(bus_id, "%x:%x:%x", &pci->domain, &pci->bus, &pci->device);
    pci->id = H100_ID;
    pci->subsystem = H100_SUBSYSTEM;
    return SUCCESS;
}

typedef struct { u64 total, free, used; } Memory;
typedef struct { unsigned version; u64 total, reserved, free, used; } MemoryV2;

int nvmlDeviceGetMemoryInfo(Device *device, Memory *memory)
{
    CHECK("nvmlDeviceGetMemoryInfo");
    if (!device->has_memory)
        return NOT_SUPPORTED;
    u64 used = device->reserved + device->used;
    *memory = (Memory){device->total, device->total - used, used};
    return SUCCESS;
}

int nvmlDeviceGetMemoryInfo_v2(Device *device, MemoryV2 *memory)
{
    CHECK("nvmlDeviceGetMemoryInfo");
    if (memory->version != MEMORY_V2)
        return FUNCTION_NOT_FOUND;
    if (!device->has_memory)
        return NOT_SUPPORTED;
    u64 free = device->total - device->reserved - device->used;
    *memory = (MemoryV2){MEMORY_V2, device->total, device->reserved, free, device->used};
    return SUCCESS;
}

int nvmlDeviceGetUtilizationRates(Device *device, unsigned rates[2])
{
    CHECK("nvmlDeviceGetUtilizationRates");
    if (!device->has_utilization)
        return NOT_SUPPORTED;
    rates[0] = device->gpu;
    rates[1] = device->memory;
    return SUCCESS;
}

#define NUMBER(call, type, has, value)         \
    int call(Device *device, type *number)     \
    {                                          \
        CHECK(#call);                          \
        if (!device->has)                      \
            return NOT_SUPPORTED;              \
        *number = device->value;               \
        return SUCCESS;                        \
    }

NUMBER(nvmlDeviceGetPowerUsage, unsigned, has_power, power)
NUMBER(nvmlDeviceGetMaxMigDeviceCount, unsigned, has_mig, mig ? device->places : 0)

int nvmlDeviceGetTemperature(Device *device, unsigned sensor, unsigned *celsius)
{
    CHECK("nvmlDeviceGetTemperature");
    if (sensor)
        return INVALID_ARGUMENT;
    if (!device->has_temperature)
        return NOT_SUPPORTED;
    *celsius = device->temperature;
    return SUCCESS;
}

int nvmlDeviceGetEccMode(Device *device, unsigned *current, unsigned *pending)
{
    CHECK("nvmlDeviceGetEccMode");
    if (!device->has_ecc)
        return NOT_SUPPORTED;
    *current = *pending = 1;
    return SUCCESS;
}

int nvmlDeviceGetTotalEccErrors(Device *device, unsigned kind, unsigned counter, u64 *count)
{
    CHECK("nvmlDeviceGetTotalEccErrors");
    if (kind > 1 || counter > 1)
        return INVALID_ARGUMENT;
    if (!device->has_ecc)
        return NOT_SUPPORTED;
    *count = kind == 1 ? device->ecc : 0;
    return SUCCESS;
}

int nvmlDeviceGetMigMode(Device *device, unsigned *current, unsigned *pending)
{
    CHECK("nvmlDeviceGetMigMode");
    if (!device->has_mig)
        return NOT_SUPPORTED;
    *current = *pending = device->mig;
    return SUCCESS;
}

int nvmlDeviceGetMigDeviceHandleByIndex(Device *device, unsigned index, Device **found)
{
    CHECK("nvmlDeviceGetMigDeviceHandleByIndex");
    if (!device->has_mig)
        return NOT_SUPPORTED;
    for (int i = 0; device->mig && i < device->instance_count; i++)
        if (device->instances[i]->place == index) {
            *found = device->instances[i];
            return SUCCESS;
        }
    return NOT_FOUND;
}

typedef struct { unsigned pid; u64 bytes; unsigned gpu_instance, compute_instance; } ProcessInfo;

static int running(const Device *device, char kind, unsigned *count, ProcessInfo *infos)
{
    unsigned found = 0, room = *count;
    for (int i = 0; i < device->process_count; i++)
        if (device->processes[i].kind == kind) {
            const Process *at = &device->processes[i];
            if (infos && found < room)
                infos[found] = (ProcessInfo){at->pid, at->bytes ? at->bytes : ~0ull, ~0u, ~0u};
            found++;
        }
    *count = found;
    return found > room ? INSUFFICIENT_SIZE : SUCCESS;
}

int nvmlDeviceGetComputeRunningProcesses_v3(Device *device, unsigned *count, ProcessInfo *infos)
{
    CHECK("nvmlDeviceGetComputeRunningProcesses");
    return running(device, 'c', count, infos);
}

int nvmlDeviceGetGraphicsRunningProcesses_v3(Device *device, unsigned *count, ProcessInfo *infos)
{
    CHECK("nvmlDeviceGetGraphicsRunningProcesses");
    return running(device, 'g', count, infos);
}

static const Pair *pair_of(const Device *one, const Device *other)
{
    for (int i = 0; i < pair_count; i++)
        if ((pairs[i].first == one->index && pairs[i].second == other->index) || (pairs[i].first == other->index && pairs[i].second == one->index))
            return &pairs[i];
    return NULL;
}

int nvmlDeviceGetTopologyCommonAncestor(Device *device, Device *other, unsigned *level)
{
    CHECK("nvmlDeviceGetTopologyCommonAncestor");
    const Pair *pair = pair_of(device, other);
    if (!pair)
        return NOT_SUPPORTED;
    *level = pair->level;
    return SUCCESS;
}

int nvmlDeviceGetP2PStatus(Device *device, Device *other, unsigned kind, unsigned *status)
{
    CHECK("nvmlDeviceGetP2PStatus");
    const Pair *pair = pair_of(device, other);
    *status = pair && (kind != 2 || pair->nvlink) ? 0 : 5; /* 5: not supported */
    return SUCCESS;
}
