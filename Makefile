# Islet: one Makefile, not recursive. `make help` lists the targets.
#
#   V=1            show command lines           SAN=address,undefined | thread   sanitised variant
#   DEBUG=1        -O0 with K_ASSERT            CC=clang                         the other compiler
#   CUDA=0         without islet-cuda.so        CUDA_ARCHS="80 86 89 90 120"      for these GPUs, as a release is
# Each variant has its own folder under build/; the default one is build/ itself.

VERSION := 0.1.0
CC      := gcc
PREFIX  ?= /usr/local
DESTDIR ?=
comma   := ,

VARIANT := $(strip $(if $(SAN),san-$(subst $(comma),-,$(SAN))) $(if $(DEBUG),debug) $(if $(filter-out gcc cc,$(CC)),$(notdir $(CC))))
JOBS    := $(shell nproc)
B       := build$(if $(VARIANT),/$(subst $() ,-,$(VARIANT)))
O       := $(B)/obj
Q       := $(if $(V),,@)
say      = $(if $(V),,@printf '  %-6s %s\n' '$(1)' '$(2)')

# ---- flags ------------------------------------------------------------------------------------------------------
WARN   := -Wall -Wextra -Wvla -Wshadow -Wstrict-prototypes -Wmissing-prototypes -Werror
OPT    := $(if $(DEBUG),-O0 -DK_DEBUG=1,-O2)
SANF   := $(if $(SAN),-fsanitize=$(SAN) -fno-omit-frame-pointer $(if $(findstring undefined,$(SAN)),-fno-sanitize-recover=undefined))
BASE   := -std=c17 -D_GNU_SOURCE $(OPT) -g -fPIC -ffp-contract=off -fno-strict-aliasing -fno-fast-math -DISLET_VERSION='"$(VERSION)"' $(SANF)
DEPF    = -MMD -MP -MF $(@:.o=.d)
LLHTTP := /usr/share/llhttp
LLHTTP_INCLUDE := /usr/share/include/llhttp

# What each folder may include, and nothing else (tests/check/forbidden_include.sh proves it).
INC_config_base := -Iconfig/base
INC_config      := -Iconfig/base -Iconfig
INC_proto       := -Iconfig/base -Iproto
INC_kernels     := -Iconfig/base -Ikernels -Ikernels/inner -Ikernels/ref -Ikernels/cpu
INC_daemon      := -Iconfig/base -Iconfig -Iproto -Ikernels -Idaemon
INC_gateway     := -Iconfig/base -Iconfig -Iproto -Igateway -isystem $(LLHTTP_INCLUDE)
INC_gateway_cli := -Iconfig/base -Iconfig -Iproto -Igateway/cli -isystem $(LLHTTP_INCLUDE)
INC_tests       := -Iconfig/base -Iconfig -Iproto -Ikernels -Ikernels/inner -Ikernels/ref -Ikernels/cpu -Ikernels/cuda -Idaemon -Igateway -Igateway/cli -Itests/support -isystem $(LLHTTP_INCLUDE)
EXTRA_proto     := -Wconversion
EXTRA_k_cuda_open := -DISLET_LIBDIR='"$(PREFIX)/lib"'
EXTRA_gguf      := -Wconversion
LEVEL_avx2      := -mavx2 -mfma -mf16c
LEVEL_avx512    := -mavx2 -mfma -mf16c -mavx512f -mavx512bw -mavx512dq -mavx512vl -mavx512vnni

# The GPU's part: one shared object, opened at run time, built where nvcc is found. A sanitised program does without.
CUDA       ?= $(if $(SAN),0,1)
NVCC       ?= $(if $(filter-out 0,$(CUDA)),$(firstword $(shell command -v nvcc) $(wildcard /usr/local/cuda/bin/nvcc)))
# Each kind takes minutes to build: this machine's, or the oldest that will do where there is none.
CUDA_HERE  := $(if $(NVCC),$(shell nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | tr -d . | sort -u))
CUDA_ARCHS ?= $(or $(CUDA_HERE),80)
# Machine code for each (90: with what only the H100's kind has), and PTX of the first for GPUs that are not in the list.
CUDA_GEN    = $(foreach a,$(CUDA_ARCHS:90=90a),-gencode arch=compute_$(a),code=sm_$(a)) \
	$(if $(filter $(CUDA_ARCHS),$(CUDA_HERE)),,-gencode arch=compute_$(firstword $(CUDA_ARCHS))$(comma)code=compute_$(firstword $(CUDA_ARCHS)))
# 128: a loop that one of a template's formats does not reach.
CUDA_FLAGS  = -std=c++17 -O3 -fmad=false -prec-div=true -prec-sqrt=true -ftz=false $(if $(DEBUG),-DK_DEBUG=1 -lineinfo) \
	-Werror all-warnings -diag-suppress 128 -Xcompiler -Wall,-Wextra,-Wvla,-Werror,-ffp-contract=off,-fno-fast-math,-fPIC
INC_cuda   := -Iconfig/base -Ikernels -Ikernels/inner -Ikernels/cuda

# A sanitised `bits` runs one in SHARE of the random cases of each kind: all kinds, levels and threads, fewer cases.
SHARE := $(if $(findstring thread,$(SAN)),8,$(if $(SAN),2,1))

# ---- sources ----------------------------------------------------------------------------------------------------
SRC_config  := $(wildcard config/base/*.c config/*.c)
SRC_proto   := $(wildcard proto/*.c)
SRC_kernels := $(wildcard kernels/*.c kernels/inner/*.c kernels/ref/*.c kernels/cpu/*.c)
SRC_cuda    := $(wildcard kernels/cuda/*.cu)
SRC_daemon  := $(filter-out daemon/worker_main.c,$(wildcard daemon/*.c))
SRC_gateway := $(filter-out gateway/gw_main.c,$(wildcard gateway/*.c))
SRC_cli     := $(filter-out gateway/cli/cli_main.c,$(wildcard gateway/cli/*.c))
SRC_support := $(filter-out tests/support/fuzz_main.c,$(wildcard tests/support/*.c))
obj          = $(patsubst %.c,$(O)/%.o,$(1))

LIBS_kernels := -pthread -ldl -lm
LIBS_common := $(LIBS_kernels) -lxxhash -linih -lsystemd
LIBS_worker := $(LIBS_common) -luv -luring
LIBS_gw     := $(LIBS_common) -luv -ljansson -lpcre2-8
LIBS_cli    := $(LIBS_common) -luv -ljansson -ledit
LIBS_tests  := $(LIBS_common) -luv -luring -ljansson -lpcre2-8 -ledit -lcmocka

AR_base    := $(O)/libbase.a
AR_config  := $(O)/libconfig.a
AR_proto   := $(B)/lib/libislet.a
AR_kernels := $(O)/libkernels.a
AR_daemon  := $(O)/libdaemon.a
AR_gateway := $(O)/libgateway.a
AR_cli     := $(O)/libcli.a
AR_support := $(O)/libsupport.a
AR_ours    := $(AR_support) $(AR_daemon) $(AR_kernels) $(AR_gateway) $(AR_cli) $(AR_config) $(AR_proto) $(AR_config)

BINS   := $(B)/bin/isletd $(B)/bin/islet-gateway $(B)/bin/islet
UNITS  := $(patsubst tests/unit/%.c,$(B)/tests/%,$(wildcard tests/unit/test_*.c))
MODELS := $(patsubst tests/model/%.c,$(B)/tests/%,$(wildcard tests/model/model_*.c))
E2ES   := $(patsubst tests/e2e/%.c,$(B)/tests/%,$(wildcard tests/e2e/e2e_*.c))
TOOLS  := $(patsubst tests/models/%.c,$(B)/bin/%,$(wildcard tests/models/*.c)) $(B)/bin/cachesim
BENCHES := $(filter-out $(B)/bin/bench_cuda_%,$(patsubst tests/bench/%.c,$(B)/bin/%,$(wildcard tests/bench/bench_*.c)))
REPLAYS := $(patsubst tests/fuzz/%.c,$(B)/tests/replay_%,$(wildcard tests/fuzz/fuzz_*.c))
CUDA_SO  := $(B)/lib/islet-cuda.so
FAKES    := $(patsubst tests/fake/fake_%.c,$(B)/tests/fake-%.so,$(wildcard tests/fake/*.c))
EXAMPLES := $(patsubst proto/examples/%.c,$(B)/bin/%,$(wildcard proto/examples/*.c))

.DEFAULT_GOAL := all
.SECONDARY:
.DELETE_ON_ERROR:
.PHONY: all help demo check check-unit check-kernels check-bits check-model check-e2e check-fuzz lint fuzz soak bench bench-serve bench-gateway bench-kernels bench-decode bench-cache bench-outofcore check-cuda bench-cuda bench-gpu bench-gpu-ssd bundle cuda install uninstall clean deps deps-demo

all: $(BINS) $(B)/lib/libislet.a $(B)/lib/libislet.so $(if $(NVCC),$(CUDA_SO),$(O)/no-nvcc) ## the three programs and libislet, islet-cuda.so where nvcc is found
cuda: $(CUDA_SO) ## islet-cuda.so alone
# Said once in a build folder.
$(O)/no-nvcc:
	@mkdir -p $(@D); touch $@; $(if $(filter-out 0,$(CUDA)),echo '  no nvcc: islet-cuda.so is not built; everything runs on the CPU',:)

# ---- rules ------------------------------------------------------------------------------------------------------
# A stamp of the flags: changed flags rebuild.
FLAGS_NOW := $(CC) $(BASE) $(WARN) $(LEVEL_avx2) $(LEVEL_avx512)
$(O)/flags: force
	@mkdir -p $(@D); printf '%s\n' "$(subst ",,$(FLAGS_NOW))" | cmp -s - $@ || printf '%s\n' "$(subst ",,$(FLAGS_NOW))" >$@
.PHONY: force

define compile
	$(call say,CC,$<)
	@mkdir -p $(@D)
	$(Q)$(CC) $(BASE) $(WARN) $(1) $(EXTRA_$(basename $(notdir $<))) $(DEPF) -c -o $@ $<
endef
$(O)/config/base/%.o: config/base/%.c $(O)/flags
	$(call compile,$(INC_config_base))
$(O)/config/%.o: config/%.c $(O)/flags
	$(call compile,$(INC_config))
$(O)/proto/%.o: proto/%.c $(O)/flags
	$(call compile,$(INC_proto) $(EXTRA_proto))
$(O)/kernels/cpu/k_avx2_%.o: kernels/cpu/k_avx2_%.c $(O)/flags
	$(call compile,$(INC_kernels) $(LEVEL_avx2))
$(O)/kernels/cpu/k_avx512_%.o: kernels/cpu/k_avx512_%.c $(O)/flags
	$(call compile,$(INC_kernels) $(LEVEL_avx512))
$(O)/kernels/%.o: kernels/%.c $(O)/flags
	$(call compile,$(INC_kernels))
$(O)/kernels/k_cuda_open.o: $(O)/libdir
$(O)/libdir: force
	@mkdir -p $(@D); printf '%s\n' "$(PREFIX)" | cmp -s - $@ || printf '%s\n' "$(PREFIX)" >$@
$(O)/cuda-flags: force
	@mkdir -p $(@D); printf '%s\n' "$(NVCC) $(CUDA_GEN) $(CUDA_FLAGS)" | cmp -s - $@ || printf '%s\n' "$(NVCC) $(CUDA_GEN) $(CUDA_FLAGS)" >$@
$(O)/kernels/cuda/%.o: kernels/cuda/%.cu $(O)/cuda-flags
	$(call say,NVCC,$<)
	@mkdir -p $(@D)
	$(Q)$(NVCC) $(CUDA_GEN) $(CUDA_FLAGS) $(INC_cuda) $(DEPF) -c -o $@ $<
$(O)/daemon/%.o: daemon/%.c $(O)/flags
	$(call compile,$(INC_daemon))
$(O)/gateway/cli/%.o: gateway/cli/%.c $(O)/flags
	$(call compile,$(INC_gateway_cli))
$(O)/gateway/%.o: gateway/%.c $(O)/flags
	$(call compile,$(INC_gateway))
$(O)/tests/%.o: tests/%.c $(O)/flags
	$(call compile,$(INC_tests) -DISLET_TEST_SHARE=$(SHARE) -DISLET_TEST_DIR='"$(CURDIR)/tests"' -DISLET_BUILD_DIR='"$(CURDIR)/$(B)"')
$(O)/proto/examples/%.o: proto/examples/%.c $(O)/flags
	$(call compile,$(INC_proto))
# llhttp is Debian's source, built strict: the default build lets bytes pass that smuggle requests.
$(O)/llhttp/%.o: $(LLHTTP)/%.c $(O)/flags
	$(call say,CC,$<)
	@mkdir -p $(@D)
	$(Q)$(CC) -std=gnu11 -O2 -g -fPIC $(SANF) -DLLHTTP_STRICT_MODE=1 -I$(LLHTTP_INCLUDE) -c -o $@ $<

define archive
	$(call say,AR,$@)
	@mkdir -p $(@D)
	$(Q)rm -f $@ && ar rcs $@ $(filter %.o,$^)
endef
$(AR_base): $(call obj,config/base/alloc.c config/base/buf.c config/base/err.c config/base/utf8.c) ; $(archive)
$(AR_config): $(call obj,$(SRC_config)) ; $(archive)
$(AR_proto): $(call obj,$(SRC_proto)) $(call obj,$(wildcard config/base/*.c)) ; $(archive)
$(AR_kernels): $(call obj,$(SRC_kernels)) ; $(archive)
$(AR_daemon): $(call obj,$(SRC_daemon)) ; $(archive)
$(AR_gateway): $(call obj,$(SRC_gateway)) $(O)/llhttp/api.o $(O)/llhttp/http.o $(O)/llhttp/llhttp.o ; $(archive)
$(AR_cli): $(call obj,$(SRC_cli)) $(O)/llhttp/api.o $(O)/llhttp/http.o $(O)/llhttp/llhttp.o ; $(archive)
$(AR_support): $(call obj,$(SRC_support)) ; $(archive)
$(B)/lib/libislet.so: $(call obj,$(SRC_proto)) $(call obj,$(wildcard config/base/*.c))
	$(call say,LD,$@)
	$(Q)$(CC) $(SANF) -shared -Wl,-soname,libislet.so.1 -o $@ $^ -pthread -lsystemd

define link
	$(call say,LD,$@)
	@mkdir -p $(@D)
	$(Q)$(CC) $(SANF) -o $@ $(filter %.o,$^) -Wl,--start-group $(filter %.a,$^) -Wl,--end-group $(1)
endef
$(B)/bin/isletd: $(O)/daemon/worker_main.o $(AR_daemon) $(AR_kernels) $(AR_config) $(AR_proto)
	$(call link,$(LIBS_worker))
$(B)/bin/islet-gateway: $(O)/gateway/gw_main.o $(AR_gateway) $(AR_config) $(AR_proto)
	$(call link,$(LIBS_gw))
$(B)/bin/islet: $(O)/gateway/cli/cli_main.o $(AR_cli) $(AR_config) $(AR_proto)
	$(call link,$(LIBS_cli))
# Its own code and what it needs of ours, all hidden but one symbol; the CUDA library is linked statically.
$(CUDA_SO): $(SRC_cuda:%.cu=$(O)/%.o) $(AR_kernels) $(AR_base) kernels/cuda/islet-cuda.map
	$(call say,LD,$@)
	@mkdir -p $(@D)
	$(Q)$(or $(NVCC),$(error islet-cuda.so needs nvcc, of the CUDA Toolkit 12 or later)) -shared -cudart static -Xcompiler -static-libstdc++,-static-libgcc \
	    -Xlinker --version-script=kernels/cuda/islet-cuda.map,--no-undefined -o $@ $(filter %.o %.a,$^) -ldl
# Stand-ins for it and for NVML, so that what opens and uses a GPU is tested without one: the reference behind the same symbol.
$(FAKES): $(B)/tests/fake-%.so: $(O)/tests/fake/fake_%.o $(AR_kernels) $(AR_base) kernels/cuda/islet-cuda.map
	$(call say,LD,$@)
	@mkdir -p $(@D)
	$(Q)$(CC) $(SANF) -shared $(if $(findstring nvml,$@),,-Wl,--version-script=kernels/cuda/islet-cuda.map) -o $@ $(filter %.o %.a,$^) $(LIBS_kernels)
$(UNITS): | $(FAKES)
$(B)/tests/test_%: $(O)/tests/unit/test_%.o $(AR_ours)
	$(call link,$(LIBS_tests))
$(B)/tests/model_%: $(O)/tests/model/model_%.o $(AR_ours)
	$(call link,$(LIBS_tests))
$(B)/tests/e2e_%: $(O)/tests/e2e/e2e_%.o $(AR_ours)
	$(call link,$(LIBS_tests))
$(B)/tests/replay_%: $(O)/tests/fuzz/%.o $(O)/tests/support/fuzz_main.o $(AR_ours)
	$(call link,$(LIBS_tests))
$(B)/tests/bits: $(call obj,$(wildcard tests/kernels/*.c)) $(AR_kernels) $(AR_base)
	$(call link,$(LIBS_kernels))
$(B)/bin/bench_cuda: $(call obj,$(wildcard tests/bench/bench_cuda*.c)) $(AR_kernels) $(AR_base)
	$(call link,$(LIBS_kernels))
$(B)/bin/bench_%: $(O)/tests/bench/bench_%.o $(AR_ours)
	$(call link,$(LIBS_tests))
$(B)/bin/cachesim: $(O)/tests/bench/cachesim.o $(AR_ours)
	$(call link,$(LIBS_tests))
$(B)/bin/%: $(O)/tests/models/%.o $(AR_ours)
	$(call link,$(LIBS_tests))
$(EXAMPLES): $(B)/bin/%: $(O)/proto/examples/%.o $(B)/lib/libislet.a
	$(call link,-pthread -lsystemd)

# ---- set-up -----------------------------------------------------------------------------------------------------
deps-demo: ## installs the Debian packages that the programs need, saying so first
	@tests/check/deps.sh build
deps: ## installs the Debian packages that the tests need, saying so first
	@tests/check/deps.sh check

# ---- demo -------------------------------------------------------------------------------------------------------
MODEL  ?= tests/models/tinymoe-q8_0.gguf
PROMPT ?= What is the capital of Norway?
demo: export ISLET_DEMO_MODEL := $(MODEL)
demo: export ISLET_DEMO_PROMPT := $(PROMPT)
demo: deps-demo ## asks the shipped model one question through both processes: make demo [MODEL=file] [PROMPT="..."]
	@$(MAKE) -s --no-print-directory -j$(JOBS) $(BINS)
	@echo "> $$ISLET_DEMO_PROMPT"
	@$(B)/bin/islet run --model "$$ISLET_DEMO_MODEL" -- "$$ISLET_DEMO_PROMPT"

# ---- tests ------------------------------------------------------------------------------------------------------
# Where leaks cannot be looked for, each program would fail or hang at its end.
ifneq ($(findstring address,$(SAN)),)
ifneq ($(filter check%,$(MAKECMDGOALS)),)
ifeq ($(ASAN_OPTIONS),)
export ASAN_OPTIONS := $(shell tests/check/leaks.sh $(CC))
endif
endif
endif
# Packages come first, then a second make that may rely on them.
check: deps ## everything below: units, kernels, model, end to end, fuzz corpora, lint
	@$(MAKE) --no-print-directory -j$(JOBS) all $(UNITS) $(MODELS) $(E2ES) $(REPLAYS) $(TOOLS) $(EXAMPLES) $(B)/tests/bits
	@for goal in check-unit check-kernels check-model check-fuzz check-e2e lint; do \
	    echo "== $$goal"; $(MAKE) --no-print-directory -j1 $$goal || exit 1; done

check-unit: $(UNITS) ## cmocka units
	@tests/check/run_tests.sh $(LIMIT_UNIT) $(UNITS)
check-kernels: $(B)/tests/bits $(FAKES) ## bits of every kernel against the scalar oracle
	@$(B)/tests/bits --quick
	@$(B)/tests/bits --backend cuda --cases 4 --file $(B)/tests/fake-cuda.so
	@! ISLET_FAKE_CUDA_WRONG=1 $(B)/tests/bits --backend cuda --only norm --cases 2 --file $(B)/tests/fake-cuda.so >$(O)/wrong.log || \
	    { echo "FAIL: bits does not see a wrong norm of a GPU"; exit 1; }
	@$(B)/tests/bits --backend cuda --quick
check-cuda: $(CUDA_SO) $(B)/tests/bits ## bits of every CUDA kernel against the scalar oracle, on a GPU
	@$(B)/tests/bits --backend cuda $(if $(CASES),--cases $(CASES),--quick)
check-bits: $(B)/tests/bits $(MODELS) ## the same with every combination (long)
	@$(B)/tests/bits --full
	@$(B)/tests/model_bits --full
check-model: $(MODELS) ## logits, chats and bits of the shipped model against the references
	@VERBOSE=1 tests/check/run_tests.sh $(LIMIT_MODEL) $(MODELS)
check-fuzz: $(REPLAYS) ## every committed fuzz input once
	@for r in $(REPLAYS); do name=$${r##*/replay_fuzz_}; echo "  $$name: $$($$r tests/fuzz/corpus/$$name)" || exit 1; done
check-e2e: all $(FAKES) $(E2ES) $(TOOLS) $(EXAMPLES) $(B)/bin/mkmodel $(B)/bin/bench_outofcore ## real sockets, official clients, killed workers
	@B=$(B) tests/e2e/run.sh
soak: all ## 10 minutes of 200 clients: memory, descriptors and queue must come back (SECONDS=n for another time)
	@B=$(B) tests/e2e/run.sh soak $(if $(filter command line,$(origin SECONDS)),$(SECONDS),600)
LIMIT_UNIT  := $(if $(SAN),1200,300)
LIMIT_MODEL := $(if $(SAN),3600,900)

FORMATTED = $(shell git ls-files -co --exclude-standard '*.c' '*.h' '*.cu' '*.cuh')
lint: all $(EXAMPLES) ## format, names, includes, mutable data, headers alone
	@clang-format-14 --dry-run -Werror $(FORMATTED)
	@awk -f tests/check/includes.awk $$(find config proto kernels daemon gateway -name '*.[ch]')
	@tests/check/forbidden_include.sh $(CC) 'config_base=$(INC_config_base)' 'config=$(INC_config)' 'proto=$(INC_proto)' \
	    'kernels=$(INC_kernels)' 'daemon=$(INC_daemon)' 'gateway=$(INC_gateway)' 'gateway_cli=$(INC_gateway_cli)'
	@tests/check/headers.sh $(INC_tests)
	$(if $(SAN),,@tests/check/names.sh $(O))
	$(if $(SAN),,@tests/check/mutable.sh $(O))
	@tests/check/docs.sh $(B)/bin
	@tests/check/man.sh --check
	@echo "lint: clean"

T       ?= $(patsubst tests/fuzz/fuzz_%.c,%,$(wildcard tests/fuzz/fuzz_*.c))
SECONDS ?= 60
FUZZ_B  := build/fuzz
fuzz: ## libFuzzer: make fuzz T=gguf SECONDS=60 (all targets without T)
	@tests/check/deps.sh fuzz
	@$(MAKE) --no-print-directory CC=clang-14 SAN=fuzzer-no-link,address,undefined fuzz-run T="$(T)" SECONDS=$(SECONDS)
fuzz-run: $(patsubst %,$(B)/fuzz/%,$(T))
	@for t in $(T); do echo "fuzz $$t: $(SECONDS) s"; mkdir -p $(FUZZ_B)/corpus/$$t; \
	    $(B)/fuzz/$$t -max_total_time=$(SECONDS) -timeout=20 -rss_limit_mb=4096 -print_final_stats=0 -verbosity=0 \
	    -artifact_prefix=$(FUZZ_B)/$$t- $(FUZZ_B)/corpus/$$t tests/fuzz/corpus/$$t || exit 1; done; \
	    echo "$(words $(T)) passed, 0 failed"
$(B)/fuzz/%: $(O)/tests/fuzz/fuzz_%.o $(AR_ours)
	@mkdir -p $(@D)
	$(Q)$(CC) -fsanitize=fuzzer,address,undefined -o $@ $(filter %.o,$^) -Wl,--start-group $(filter %.a,$^) -Wl,--end-group $(LIBS_tests)
.PHONY: fuzz-run

# ---- benches ----------------------------------------------------------------------------------------------------
bench: bench-kernels bench-decode bench-gateway bench-serve ## the figures of tests/bench/RESULTS.md that need neither a large model nor a GPU
bench-kernels: $(B)/bin/bench_kernels ## GB/s of weights, by format, level, rows and threads
	@mkdir -p $(B)/bench && $<
M16 := build/models/m16.gguf
$(M16): $(B)/bin/mkmodel
	@mkdir -p $(@D) && $< --preset m16 --out $@
bench-decode: $(B)/bin/bench_decode $(M16) ## tokens/s of tinymoe and a generated 1.7 GB model at 1, 4 and 16 rows
	@mkdir -p $(B)/bench && $< tests/models/tinymoe-q8_0.gguf && $< $(M16)
# Models of bench-outofcore, 9.15 GB each: make bench-outofcore ROUTERS="m89 skewed topics uniform", or GGUFS="FILE=NAME ..."
ROUTERS ?= m89
ROUTER_skewed  := --zipf 1
ROUTER_topics  := --topics 16
ROUTER_uniform := --locality 0
GGUFS ?= $(foreach r,$(ROUTERS),build/models/$(patsubst m89-m89,m89,m89-$(r)).gguf=$(r))
build/models/m89.gguf: | $(B)/bin/mkmodel
	@mkdir -p $(@D) && $(B)/bin/mkmodel --preset m89 --out $@
build/models/m89-%.gguf: | $(B)/bin/mkmodel
	@mkdir -p $(@D) && $(B)/bin/mkmodel --preset m89 $(or $(ROUTER_$*),$(error no router $*: m89 skewed topics uniform)) --out $@
BENCH_GGUFS = $(foreach g,$(GGUFS),$(firstword $(subst =, ,$(g))))
bench-outofcore: all $(B)/bin/bench_outofcore $(B)/bin/bench_ssd $(B)/bin/cachesim $(if $(HELP),,$(BENCH_GGUFS)) ## a 9 GB model under 1.5, 3 and 6 GB, llama.cpp beside it (HELP=1: options)
	@B=$(B) GGUFS="$(GGUFS)" node tests/bench/outofcore.mjs $(if $(HELP),--help)
bench-cache: $(B)/bin/cachesim ## hits and bytes a token of the expert cache against LRU, LFU, Belady ..., with plots in build/bench
	@mkdir -p $(B)/bench && $< tests/models/tinymoe-chat.trace --plot $(B)/bench/cache-tinymoe.svg && \
	    $< tests/models/m89-noise.trace --plot $(B)/bench/cache-m89.svg && \
	    $< --generate tokens=1500 --plot $(B)/bench/cache-generated.svg
bench-cuda: $(CUDA_SO) $(B)/bin/bench_cuda ## GB/s and TOPS of the CUDA kernels beside the copy bandwidth of the same run
	@mkdir -p $(B)/bench && $(B)/bin/bench_cuda
# Budgets that play smaller cards. Routers that know nothing (--locality 0), and those of mkmodel without options, where the text makes locality.
ROUTER_text := --seed 1
H30      ?= build/models/h30-uniform.gguf
H30_TEXT ?= build/models/h30-text.gguf
H75      ?= build/models/h75-text.gguf
build/models/h30-%.gguf: | $(B)/bin/mkmodel
	@mkdir -p $(@D) && $(B)/bin/mkmodel --preset h30 $(or $(ROUTER_$*),$(error no router $*: uniform text)) --out $@
build/models/h75-%.gguf: | $(B)/bin/mkmodel
	@mkdir -p $(@D) && $(B)/bin/mkmodel --preset h75 $(or $(ROUTER_$*),$(error no router $*: uniform text)) --out $@
GPU_ROWS = --json $(B)/bench/cuda.json
bench-gpu: $(CUDA_SO) $(B)/bin/bench_gpu $(H30) $(H30_TEXT) ## tokens a second of the engine with a GPU, by budget and placement: rows of build/bench/cuda.json
	@mkdir -p $(B)/bench
	@$(B)/bin/bench_gpu $(H30) --vram 0 --prefill 512,2048 --tokens 256 --peer resident $(GPU_ROWS)
	@$(B)/bin/bench_gpu $(H30) --vram 12 --prefill 512,2048 --tokens 256 --peer 12gib $(GPU_ROWS)
	@$(B)/bin/bench_gpu $(H30) --vram 12 --placement cpu,layers,copy --rows 1 --tokens 64 --peer 12gib $(GPU_ROWS)
	@$(B)/bin/bench_gpu $(H30) --vram 2.6,-1 --rows 1 --tokens 64 --peer cpu $(GPU_ROWS)
	@$(B)/bin/bench_gpu $(H30_TEXT) --vram 12 --prefill 512,2048 --tokens 256 --router text $(GPU_ROWS)
	@$(B)/bin/bench_gpu $(H30_TEXT) --vram 12 --placement cpu,layers,copy --rows 1 --tokens 64 --router text $(GPU_ROWS)
bench-gpu-ssd: $(CUDA_SO) $(B)/bin/bench_gpu $(H75) ## the same of a 45 GB model with 12 GiB of VRAM and 12 GiB of RAM, cold and warm (45 GB of disk)
	@mkdir -p $(B)/bench
	@$(B)/bin/bench_gpu $(H75) --vram 12 --ram 12 --cold 1 --rows 1 --tokens 256 --router text $(GPU_ROWS)
BUNDLE := $(B)/islet-cuda-bundle.tar.gz
bundle: ## one file for a bare GPU machine: tar -xzf it there, then tests/device.sh
	@mkdir -p $(B); git ls-files -co --exclude-standard Makefile LICENSE config/base kernels tests/kernels tests/bench/bench_cuda*.[ch] tests/device.sh | \
	    tar -czf $(BUNDLE) --transform 's,^,islet/,' -T - && echo "$(BUNDLE): $$(du -h $(BUNDLE) | cut -f1); there: tar -xzf islet-cuda-bundle.tar.gz && islet/tests/device.sh"
bench-gateway: $(B)/bin/bench_gateway all ## what the gateway adds: latency, CPU a token, memory
	@mkdir -p $(B)/bench && $<
bench-serve: all ## time to first token and P95 inter-token time at 1, 4, 16 clients
	@B=$(B) tests/bench/serve.sh

# ---- install ----------------------------------------------------------------------------------------------------
MAN1 := $(wildcard config/man/*.1)
MAN5 := $(wildcard config/man/*.5)
MAN8 := $(wildcard config/man/*.8)
install: all ## programs, libislet, headers, man pages, islet.conf under DESTDIR and PREFIX
	install -d $(DESTDIR)$(PREFIX)/bin $(DESTDIR)$(PREFIX)/lib $(DESTDIR)$(PREFIX)/include/islet $(DESTDIR)/etc/islet
	install -m 755 $(BINS) $(DESTDIR)$(PREFIX)/bin
	install -m 644 $(B)/lib/libislet.a $(DESTDIR)$(PREFIX)/lib
	install -m 755 $(B)/lib/libislet.so $(DESTDIR)$(PREFIX)/lib/libislet.so.1
	ln -sf libislet.so.1 $(DESTDIR)$(PREFIX)/lib/libislet.so
	$(if $(NVCC),install -m 755 $(CUDA_SO) $(DESTDIR)$(PREFIX)/lib)
	install -m 644 proto/*.h proto/*.def config/base/err.h config/base/buf.h $(DESTDIR)$(PREFIX)/include/islet
	for n in 1 5 8; do for f in config/man/*.$$n; do [ ! -f $$f ] || install -D -m 644 $$f $(DESTDIR)$(PREFIX)/share/man/man$$n/$${f##*/}; done; done
	[ -e $(DESTDIR)/etc/islet/islet.conf ] || install -m 644 config/islet.conf $(DESTDIR)/etc/islet/islet.conf
uninstall: ## removes what install put there; islet.conf stays
	rm -f $(addprefix $(DESTDIR)$(PREFIX)/bin/,$(notdir $(BINS)))
	rm -f $(DESTDIR)$(PREFIX)/lib/libislet.a $(DESTDIR)$(PREFIX)/lib/libislet.so $(DESTDIR)$(PREFIX)/lib/libislet.so.1 $(DESTDIR)$(PREFIX)/lib/islet-cuda.so
	rm -rf $(DESTDIR)$(PREFIX)/include/islet
	rm -f $(foreach n,1 5 8,$(addprefix $(DESTDIR)$(PREFIX)/share/man/man$(n)/,$(notdir $(MAN$(n)))))

clean: ## removes build/
	$(Q)rm -rf build

help: ## this list
	@grep -hE '^[a-z][a-z-]*:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## */\t/' | sort -u | awk -F'\t' '{printf "  %-16s %s\n", $$1, $$2}'

-include $(shell find $(O) -name '*.d' 2>/dev/null)
