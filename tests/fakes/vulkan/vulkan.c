/*
 * A libvulkan.so.1 without a driver: the calls that list devices, answered from the file vulkan.state beside it.
 *
 * Its lines, leading blanks ignored:
 *
 *   version MAJOR MINOR              of the loader; without this line 1.3
 *   fail FUNCTION CODE               FUNCTION returns CODE
 *   noise TEXT                       printed on stdout, as some layers do
 *   hang / abort                     what vkCreateInstance does
 *   device                           begins a device
 *   name TEXT / type N / vendor N / driver N / uuid HEX
 *   api MAJOR MINOR                  of the device; without this line 1.3
 *   pci DOMAIN:BUS:DEVICE.FUNCTION   hexadecimal; without this line it has no VK_EXT_pci_bus_info
 *   heap BYTES FLAGS                 flag 1: the device's own
 *
 * It is strict where a driver may be: a structure that the device does not know, or an instance for another version than
 * the loader's, ends the process. The structures follow the published ABI; nothing here comes from Khronos.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <limits.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { MAX_DEVICES = 8, MAX_HEAPS = 16, MAX_FAILURES = 8, INCOMPLETE = 5, NO_MEMORY = -1 };
enum { APPLICATION_INFO = 0, INSTANCE_CREATE_INFO = 1 };
enum { PROPERTIES_2 = 1000059001, ID = 1000071004, DRIVER = 1000196000, PCI = 1000212000 };

struct chain { uint32_t kind; struct chain *next; };
struct application {
    uint32_t kind; void *next; const char *name; uint32_t version; const char *engine; uint32_t engine_version, api;
};
struct instance_info {
    uint32_t kind; void *next; uint32_t flags; const struct application *application;
    uint32_t layer_count; const char *const *layers; uint32_t extension_count; const char *const *extensions;
};
struct extension { char name[256]; uint32_t version; };
struct properties {
    uint32_t api, driver_version, vendor, device, type; char name[256]; uint8_t cache_uuid[16];
    uint64_t limits[63]; uint32_t sparse[5];
};
struct properties_2 { uint32_t kind; struct chain *next; struct properties properties; };
struct id { uint32_t kind; void *next; uint8_t device[16], driver[16], luid[8]; uint32_t nodes, has_luid; };
struct driver { uint32_t kind; void *next; uint32_t id; char name[256], info[256]; uint8_t conformance[4]; };
struct pci { uint32_t kind; void *next; uint32_t domain, bus, device, function; };
struct memory {
    uint32_t type_count; struct { uint32_t flags, heap; } types[32];
    uint32_t heap_count; struct { uint64_t size; uint32_t flags; } heaps[16];
};

struct device {
    char name[256]; uint32_t type, vendor, driver, api; uint8_t uuid[16];
    int has_pci; uint32_t pci[4]; uint32_t heap_count; uint64_t sizes[MAX_HEAPS]; uint32_t flags[MAX_HEAPS];
};

static struct device devices[MAX_DEVICES];
static uint32_t device_count, version;
static struct { char function[64]; int code; } failures[MAX_FAILURES];
static int failure_count, hangs, aborts;

static uint32_t api_version(unsigned major, unsigned minor) { return major << 22 | minor << 12; }

static void die(const char *why) { fprintf(stderr, "fake vulkan: %s\n", why); abort(); }

__attribute__((constructor)) static void read_state(void)
{
    Dl_info self;
    char path[PATH_MAX], line[512];
    if (!dladdr((void *)read_state, &self)) die("does not find itself");
    snprintf(path, sizeof path, "%s", self.dli_fname);
    *strrchr(path, '/') = 0;
    strncat(path, "/vulkan.state", sizeof path - strlen(path) - 1);
    FILE *file = fopen(path, "r");
    if (!file) die("no state");
    version = api_version(1, 3);
    while (fgets(line, sizeof line, file)) {
        char *text = line + strspn(line, " "), function[64];
        unsigned a, b;
        int code;
        text[strcspn(text, "\n")] = 0;
        struct device *last = device_count ? &devices[device_count - 1] : NULL;
        if (!strcmp(text, "device")) {
            if (device_count == MAX_DEVICES) die("too many devices");
            last = &devices[device_count++];
            last->api = api_version(1, 3);
        } else if (sscanf(text, "version %u %u", &a, &b) == 2) version = api_version(a, b);
        else if (sscanf(text, "fail %63s %d", function, &code) == 2 && failure_count < MAX_FAILURES) {
            strcpy(failures[failure_count].function, function);
            failures[failure_count++].code = code;
        } else if (!strncmp(text, "noise ", 6)) puts(text + 6);
        else if (!strcmp(text, "hang")) hangs = 1;
        else if (!strcmp(text, "abort")) aborts = 1;
        else if (!last) die(text);
        else if (!strncmp(text, "name ", 5)) snprintf(last->name, sizeof last->name, "%s", text + 5);
        else if (sscanf(text, "type %u", &last->type) == 1) continue;
        else if (sscanf(text, "vendor %u", &last->vendor) == 1) continue;
        else if (sscanf(text, "driver %u", &last->driver) == 1) continue;
        else if (sscanf(text, "api %u %u", &a, &b) == 2) last->api = api_version(a, b);
        else if (sscanf(text, "pci %x:%x:%x.%x", &last->pci[0], &last->pci[1], &last->pci[2], &last->pci[3]) == 4)
            last->has_pci = 1;
        else if (!strncmp(text, "uuid ", 5))
            for (int i = 0; i < 16 && sscanf(text + 5 + 2 * i, "%2x", &a) == 1; i++) last->uuid[i] = (uint8_t)a;
        else if (last->heap_count < MAX_HEAPS &&
                 sscanf(text, "heap %lu %u", &last->sizes[last->heap_count], &last->flags[last->heap_count]) == 2)
            last->heap_count++;
        else die(text);
    }
    fclose(file);
    fflush(stdout);
}

static int result(const char *function)
{
    for (int i = 0; i < failure_count; i++)
        if (!strcmp(failures[i].function, function)) return failures[i].code;
    return 0;
}

int vkEnumerateInstanceVersion(uint32_t *found)
{
    *found = version;
    return result(__func__);
}

int vkCreateInstance(const struct instance_info *info, const void *allocator, void **instance)
{
    static int made;
    if (hangs) for (;;) pause();
    if (aborts) die("the driver gives up");
    if (info->kind != INSTANCE_CREATE_INFO || info->next || allocator) die("no instance is described");
    const struct application *application = info->application;
    if (application->kind != APPLICATION_INFO || application->api != version) die("another version is asked for");
    if (strcmp(application->name, "ggml-vulkan")) die("another application");
    if (info->layer_count || info->extension_count) die("layers or extensions");
    *instance = &made;
    return result(__func__);
}

int vkEnumeratePhysicalDevices(void *instance, uint32_t *count, void **found)
{
    if (!instance) die("no instance");
    uint32_t room = found ? *count : device_count;
    *count = room < device_count ? room : device_count;
    for (uint32_t i = 0; found && i < *count; i++) found[i] = &devices[i];
    int code = result(__func__);
    return code ? code : room < device_count ? INCOMPLETE : 0;
}

void vkGetPhysicalDeviceProperties(const struct device *device, struct properties *found)
{
    memset(found, 0xff, sizeof *found);
    found->api = device->api;
    found->type = device->type;
    found->vendor = device->vendor;
    memcpy(found->name, device->name, sizeof found->name);
}

void vkGetPhysicalDeviceProperties2(const struct device *device, struct properties_2 *found)
{
    if (device->api < api_version(1, 1)) die("a device of version 1.0 has no such properties");
    if (found->kind != PROPERTIES_2) die("no properties are described");
    vkGetPhysicalDeviceProperties(device, &found->properties);
    for (struct chain *each = found->next; each; each = each->next) {
        if (each->kind == ID) {
            struct id *id = (struct id *)each;
            memcpy(id->device, device->uuid, 16);
        } else if (each->kind == DRIVER && device->api >= api_version(1, 2)) {
            struct driver *driver = (struct driver *)each;
            driver->id = device->driver;
            memset(driver->name, 'x', sizeof driver->name + sizeof driver->info);
        } else if (each->kind == PCI && device->has_pci) {
            struct pci *pci = (struct pci *)each;
            memcpy(&pci->domain, device->pci, sizeof device->pci);
        } else die("a structure that this device does not know");
    }
}

void vkGetPhysicalDeviceMemoryProperties(const struct device *device, struct memory *found)
{
    memset(found, 0xff, sizeof *found);
    found->type_count = 0;
    found->heap_count = device->heap_count;
    for (uint32_t i = 0; i < device->heap_count; i++) {
        found->heaps[i].size = device->sizes[i];
        found->heaps[i].flags = device->flags[i];
    }
}

int vkEnumerateDeviceExtensionProperties(
    const struct device *device, const char *layer, uint32_t *count, struct extension *found)
{
    static const char *const names[] = {"VK_KHR_swapchain", "VK_EXT_memory_budget", "VK_EXT_pci_bus_info"};
    uint32_t known = device->has_pci ? 3 : 2, room = found ? *count : known;
    if (layer) die("a layer");
    *count = room < known ? room : known;
    for (uint32_t i = 0; found && i < *count; i++) {
        memset(&found[i], 0, sizeof found[i]);
        strcpy(found[i].name, names[i]);
    }
    int code = result(__func__);
    return code ? code : room < known ? INCOMPLETE : 0;
}
