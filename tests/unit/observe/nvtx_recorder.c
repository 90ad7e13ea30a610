/* An NVTX injection library that writes each event as a line of JSON to the file NVTX_RECORD names: ranges can be tested
 * without a GPU and without Nsight. Loaded through NVTX_INJECTION64_PATH; see "Injection" in NVTX's documentation. */

#include <nvtx3/nvToolsExt.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct nvtxDomainRegistration_st {
    char name[64];
};

static FILE *events;

static const char *message_of(const nvtxEventAttributes_t *event) {
    if (event->messageType == NVTX_MESSAGE_TYPE_ASCII) return event->message.ascii;
    if (event->messageType == NVTX_MESSAGE_TYPE_REGISTERED) return (const char *)event->message.registered;
    return "";
}

static long long payload_of(const nvtxEventAttributes_t *event) {
    switch (event->payloadType) {
        case NVTX_PAYLOAD_TYPE_INT64: return (long long)event->payload.llValue;
        case NVTX_PAYLOAD_TYPE_UNSIGNED_INT64: return (long long)event->payload.ullValue;
        case NVTX_PAYLOAD_TYPE_INT32: return event->payload.iValue;
        default: return -1;
    }
}

static void write_event(const char *kind, nvtxDomainHandle_t domain, const nvtxEventAttributes_t *event) {
    fprintf(events, "{\"kind\": \"%s\", \"domain\": \"%s\", \"name\": \"%s\", \"category\": %u, \"payload\": %lld}\n", kind,
            domain ? domain->name : "", message_of(event), event->category, payload_of(event));
}

static nvtxDomainHandle_t create_domain(const char *name) {
    nvtxDomainHandle_t domain = calloc(1, sizeof *domain);
    strncpy(domain->name, name, sizeof domain->name - 1);
    return domain;
}

static nvtxStringHandle_t register_string(nvtxDomainHandle_t domain, const char *text) {
    (void)domain;
    return (nvtxStringHandle_t)strdup(text);
}

static void name_category(nvtxDomainHandle_t domain, uint32_t number, const char *name) {
    fprintf(events, "{\"kind\": \"category\", \"domain\": \"%s\", \"name\": \"%s\", \"category\": %u}\n", domain->name, name,
            number);
}

static int push(nvtxDomainHandle_t domain, const nvtxEventAttributes_t *event) {
    write_event("push", domain, event);
    return 0;
}

static int pop(nvtxDomainHandle_t domain) {
    fprintf(events, "{\"kind\": \"pop\", \"domain\": \"%s\"}\n", domain->name);
    return 0;
}

/* torch's own binding has no domain */

static int push_plain(const char *text) {
    fprintf(events, "{\"kind\": \"push\", \"domain\": \"\", \"name\": \"%s\"}\n", text);
    return 0;
}

static int pop_plain(void) {
    fprintf(events, "{\"kind\": \"pop\", \"domain\": \"\"}\n");
    return 0;
}

static void mark(nvtxDomainHandle_t domain, const nvtxEventAttributes_t *event) { write_event("mark", domain, event); }

static void name_stream(const void *stream, const char *name) {
    fprintf(events, "{\"kind\": \"stream\", \"domain\": \"\", \"name\": \"%s\", \"payload\": %llu}\n", name,
            (unsigned long long)(uintptr_t)stream);
}

static void close_events(void) { fclose(events); }

__attribute__((visibility("default"))) int InitializeInjectionNvtx2(NvtxGetExportTableFunc_t get_table) {
    const NvtxExportTableCallbacks *callbacks = (const NvtxExportTableCallbacks *)get_table(NVTX_ETID_CALLBACKS);
    NvtxFunctionTable table = NULL;
    unsigned int size = 0;
    const char *path = getenv("NVTX_RECORD");
    /* each library with NVTX in it asks anew */
    if (!callbacks || !path) return 0;
    if (!events) {
        if (!(events = fopen(path, "w"))) return 0;
        atexit(close_events);
    }
    if (!callbacks->GetModuleFunctionTable(NVTX_CB_MODULE_CORE, &table, &size)) return 0;
    *table[NVTX_CBID_CORE_RangePushA] = (NvtxFunctionPointer)push_plain;
    *table[NVTX_CBID_CORE_RangePop] = (NvtxFunctionPointer)pop_plain;
    if (!callbacks->GetModuleFunctionTable(NVTX_CB_MODULE_CUDART, &table, &size)) return 0;
    *table[NVTX_CBID_CUDART_NameCudaStreamA] = (NvtxFunctionPointer)name_stream;
    if (!callbacks->GetModuleFunctionTable(NVTX_CB_MODULE_CORE2, &table, &size)) return 0;
    *table[NVTX_CBID_CORE2_DomainCreateA] = (NvtxFunctionPointer)create_domain;
    *table[NVTX_CBID_CORE2_DomainRegisterStringA] = (NvtxFunctionPointer)register_string;
    *table[NVTX_CBID_CORE2_DomainNameCategoryA] = (NvtxFunctionPointer)name_category;
    *table[NVTX_CBID_CORE2_DomainRangePushEx] = (NvtxFunctionPointer)push;
    *table[NVTX_CBID_CORE2_DomainRangePop] = (NvtxFunctionPointer)pop;
    *table[NVTX_CBID_CORE2_DomainMarkEx] = (NvtxFunctionPointer)mark;
    return 1;
}
