/** The programs of a real control plane that the tests start, and where they are once they are built. */
import { createHash } from 'node:crypto';
import { existsSync, readFileSync } from 'node:fs';
import path from 'node:path';
import { cacheFolder } from '../../../lib/transfer/rclone-binary.ts';

export const KUBERNETES_VERSION = '1.36.3';
export const ETCD_VERSION = '3.7.3';
export const CSI_SANITY_VERSION = '5.6.0';
export const HELM_VERSION = '3.22.0';
export const KUBECONFORM_VERSION = '0.8.0';
export const PROMETHEUS_OPERATOR_VERSION = '0.88.0';
export const CONTAINERD_VERSION = '2.4.2';
export const RUNC_VERSION = '1.4.0';
export const CSI_PROVISIONER_VERSION = '6.4.0';

const CONTAINERD = 'github.com/containerd/containerd/v2';
const SOURCES = path.join(path.dirname(import.meta.dirname), 'programs');
const [MAJOR, MINOR] = KUBERNETES_VERSION.split('.');
const VERSION_PACKAGE = 'k8s.io/component-base/version';
const VERSION_FLAGS = [
  `-X ${VERSION_PACKAGE}.gitVersion=v${KUBERNETES_VERSION}`,
  `-X ${VERSION_PACKAGE}.gitMajor=${MAJOR}`,
  `-X ${VERSION_PACKAGE}.gitMinor=${MINOR}`,
];

/** A Go module below test/kube/programs and what is built in it. */
export interface ProgramModule {
  /** folder with go.mod and go.sum */
  folder: string;
  /** for people */
  version: string;
  linkerFlags: string;
  /** program to Go package */
  packages: Readonly<Record<string, string>>;
  /** where it lives is told by its own sources alone: the others are not built anew when it changes */
  alone?: boolean;
  /** needs C libraries (the header of each, below /usr/include) and these build tags */
  cgo?: { tags: string; headers: readonly string[] };
}

export const MODULES: readonly ProgramModule[] = [
  {
    folder: path.join(SOURCES, 'etcd'),
    version: `etcd ${ETCD_VERSION}`,
    linkerFlags: '-s -w',
    packages: { etcd: '.' },
  },
  {
    folder: path.join(SOURCES, 'kubernetes'),
    version: `Kubernetes ${KUBERNETES_VERSION}`,
    linkerFlags: ['-s -w', ...VERSION_FLAGS].join(' '),
    packages: Object.fromEntries(
      ['kube-apiserver', 'kubectl', 'kube-controller-manager', 'kube-scheduler', 'kubelet', 'kube-proxy'].map(
        (program) => [program, `k8s.io/kubernetes/cmd/${program}`],
      ),
    ),
  },
  {
    folder: path.join(SOURCES, 'csi-sanity'),
    version: `csi-sanity ${CSI_SANITY_VERSION}`,
    linkerFlags: '-s -w',
    packages: { 'csi-sanity': 'github.com/kubernetes-csi/csi-test/v5/cmd/csi-sanity' },
    alone: true,
  },
  {
    folder: path.join(SOURCES, 'helm'),
    version: `helm ${HELM_VERSION}`,
    linkerFlags: [
      '-s -w',
      `-X helm.sh/helm/v3/internal/version.version=v${HELM_VERSION}`,
      // The oldest Kubernetes that `helm template` believes in without a cluster.
      ...['chartutil', 'lint/rules'].flatMap((one) => [
        `-X helm.sh/helm/v3/pkg/${one}.k8sVersionMajor=${MAJOR}`,
        `-X helm.sh/helm/v3/pkg/${one}.k8sVersionMinor=${MINOR}`,
      ]),
    ].join(' '),
    packages: { helm: 'helm.sh/helm/v3/cmd/helm' },
    alone: true,
  },
  {
    folder: path.join(SOURCES, 'kubeconform'),
    version: `kubeconform ${KUBECONFORM_VERSION}`,
    linkerFlags: `-s -w -X main.version=v${KUBECONFORM_VERSION}`,
    packages: { kubeconform: 'github.com/yannh/kubeconform/cmd/kubeconform' },
    alone: true,
  },
  {
    folder: path.join(SOURCES, 'monitoring-check'),
    version: `monitoring-check ${PROMETHEUS_OPERATOR_VERSION}`,
    linkerFlags: '-s -w',
    packages: { 'monitoring-check': '.' },
    alone: true,
  },
  {
    folder: path.join(SOURCES, 'runc'),
    version: `runc ${RUNC_VERSION}`,
    linkerFlags: '-s -w',
    packages: { runc: 'github.com/opencontainers/runc' },
    alone: true,
    cgo: { tags: 'seccomp', headers: ['seccomp.h'] },
  },
  {
    folder: path.join(SOURCES, 'containerd'),
    version: `containerd ${CONTAINERD_VERSION}`,
    linkerFlags: `-s -w -X ${CONTAINERD}/version.Version=${CONTAINERD_VERSION}`,
    packages: Object.fromEntries(
      ['containerd', 'containerd-shim-runc-v2', 'ctr'].map((program) => [
        program,
        `${CONTAINERD}/cmd/${program}`,
      ]),
    ),
    alone: true,
  },
  {
    folder: path.join(SOURCES, 'csi-provisioner'),
    version: `csi-provisioner ${CSI_PROVISIONER_VERSION}`,
    linkerFlags: `-s -w -X main.version=v${CSI_PROVISIONER_VERSION}`,
    packages: { 'csi-provisioner': 'github.com/kubernetes-csi/external-provisioner/v6/cmd/csi-provisioner' },
    alone: true,
  },
];

/** What the tests of test/kube need: an API server, its store and kubectl. */
export const API_PROGRAMS = ['etcd', 'kube-apiserver', 'kubectl'] as const;

/** What a whole cluster with nodes needs (test/cluster). */
export const CLUSTER_PROGRAMS = [
  ...API_PROGRAMS,
  'helm',
  'runc',
  'containerd',
  'containerd-shim-runc-v2',
  'ctr',
  'csi-provisioner',
  'kube-controller-manager',
  'kube-scheduler',
  'kubelet',
  'kube-proxy',
] as const;

/** Every program that can be built. */
export const ALL_PROGRAMS: readonly string[] = MODULES.flatMap((module) => Object.keys(module.packages));

const cache = (env: NodeJS.ProcessEnv): string =>
  path.join(env.SIMPLE_VOLUME_CACHE || cacheFolder(env), 'kube');

/** Changes with the sources of these modules. */
function keyOfSources(modules: readonly ProgramModule[]): string {
  const hash = createHash('sha256');
  for (const { folder, linkerFlags, packages, cgo } of modules) {
    hash.update(`\0${linkerFlags}\0${Object.keys(packages)}${cgo ? `\0${cgo.tags}` : ''}`);
    for (const file of ['go.mod', 'go.sum', 'main.go']) {
      if (existsSync(path.join(folder, file))) hash.update(readFileSync(path.join(folder, file)));
    }
  }
  return `${hash.digest('hex').slice(0, 12)}-${process.arch}`;
}

/**
 * Where the programs of exactly these sources live: `kube/<versions>` below SIMPLE_VOLUME_CACHE, by default
 * `~/.cache/simple-volume`.
 */
export function programsFolder(env: NodeJS.ProcessEnv = process.env): string {
  const key = keyOfSources(MODULES.filter(({ alone }) => !alone));
  return path.join(cache(env), `${KUBERNETES_VERSION}-etcd-${ETCD_VERSION}-${key}`);
}

/** Where the programs of one module live. */
export function moduleFolder(module: ProgramModule, env: NodeJS.ProcessEnv = process.env): string {
  if (!module.alone) return programsFolder(env);
  return path.join(cache(env), `${module.version.replaceAll(' ', '-')}-${keyOfSources([module])}`);
}

/** Absolute path of a program that is built, null when it is not. */
export function kubeProgram(program: string, env: NodeJS.ProcessEnv = process.env): string | null {
  const module = MODULES.find(({ packages }) => packages[program] !== undefined);
  if (!module) return null;
  const file = path.join(moduleFolder(module, env), program);
  return existsSync(file) ? file : null;
}

/** Why tests on a real API server cannot run here, false when they can: the `skip` of a test. */
export function noKube(programs: readonly string[] = API_PROGRAMS): string | false {
  const missing = programs.filter((program) => kubeProgram(program) === null);
  return missing.length === 0
    ? false
    : `not built: ${missing.join(', ')} (node test/kube/harness/build.ts ${missing.join(' ')}, needs Go 1.26)`;
}

export const NO_RBAC_PROXY =
  'no kube-rbac-proxy on the PATH, named by SIMPLE_VOLUME_KUBE_RBAC_PROXY or in ../shared/bin';

/**
 * kube-rbac-proxy, which is no Go module that could be built here: on the PATH, named by SIMPLE_VOLUME_KUBE_RBAC_PROXY,
 * or in `shared/bin` beside the checkout.
 */
export function rbacProxy(env: NodeJS.ProcessEnv = process.env): string | null {
  const named = env.SIMPLE_VOLUME_KUBE_RBAC_PROXY;
  const places = [
    ...(named ? [named] : []),
    ...(env.PATH ?? '').split(':').map((folder) => path.join(folder, 'kube-rbac-proxy')),
    path.join(import.meta.dirname, '../../../../shared/bin/kube-rbac-proxy'),
  ];
  return places.find((file) => existsSync(file)) ?? null;
}
