/**
 * `npm run image -- [--arch x64,arm64] --out FILE --tag NAME:TAG`: the image as an OCI image layout in one tar file,
 * without Docker: `ctr images import`, `skopeo copy oci-archive:`, `crane push` and `docker load` take it. The same
 * inputs give the same bytes.
 */
import { execFileSync } from 'node:child_process';
import { createHash } from 'node:crypto';
import {
  createReadStream,
  createWriteStream,
  mkdirSync,
  mkdtempSync,
  readFileSync,
  renameSync,
  rmSync,
  statSync,
  writeFileSync,
} from 'node:fs';
import { tmpdir } from 'node:os';
import path from 'node:path';
import { pipeline } from 'node:stream/promises';
import { parseArgs } from 'node:util';
import { createGzip } from 'node:zlib';
import { ARCHITECTURES, type Architecture, assemble, NONROOT } from './rootfs.ts';

const PROJECT = path.resolve(import.meta.dirname, '../..');
const OCI_ARCHITECTURE: Record<Architecture, string> = { x64: 'amd64', arm64: 'arm64' };
const MEDIA = {
  index: 'application/vnd.oci.image.index.v1+json',
  manifest: 'application/vnd.oci.image.manifest.v1+json',
  config: 'application/vnd.oci.image.config.v1+json',
  layer: 'application/vnd.oci.image.layer.v1.tar+gzip',
};

export interface BuiltImage {
  arch: Architecture;
  /** what a registry stores and a node pulls, bytes */
  compressedBytes: number;
  digest: string;
}

interface Descriptor {
  mediaType: string;
  digest: string;
  size: number;
}

async function hashOf(file: string): Promise<string> {
  const hash = createHash('sha256');
  for await (const chunk of createReadStream(file)) hash.update(chunk as Buffer);
  return hash.digest('hex');
}

/** Tar without anything of this machine: names in order, no owners, no times. */
function pack(folder: string, file: string): void {
  const plain = ['--sort=name', '--mtime=@0', '--owner=0', '--group=0', '--numeric-owner', '--format=posix'];
  const pax = '--pax-option=delete=atime,delete=ctime,delete=mtime';
  execFileSync('tar', ['-c', ...plain, pax, '-f', file, '-C', folder, '.']);
}

/** @param tag NAME:TAG, as the image is called after an import */
export async function buildImage(
  architectures: readonly Architecture[],
  out: string,
  tag: string,
  say: (line: string) => void,
): Promise<BuiltImage[]> {
  const scratch = mkdtempSync(path.join(tmpdir(), 'simple-volume-image-'));
  try {
    const layout = path.join(scratch, 'layout');
    const blobs = path.join(layout, 'blobs/sha256');
    mkdirSync(blobs, { recursive: true });
    const put = (mediaType: string, content: object): Descriptor => {
      const bytes = Buffer.from(JSON.stringify(content));
      const hex = createHash('sha256').update(bytes).digest('hex');
      writeFileSync(path.join(blobs, hex), bytes);
      return { mediaType, digest: `sha256:${hex}`, size: bytes.length };
    };
    const { version } = JSON.parse(readFileSync(path.join(PROJECT, 'package.json'), 'utf8')) as {
      version: string;
    };
    const built: BuiltImage[] = [];
    const manifests: (Descriptor & { platform: object })[] = [];
    for (const arch of architectures) {
      const { base, app } = assemble(arch, path.join(scratch, arch), say);
      const layers: Descriptor[] = [];
      const plain: string[] = [];
      for (const folder of [base, app]) {
        const tar = path.join(scratch, 'layer.tar');
        const packed = path.join(scratch, 'layer.tar.gz');
        pack(folder, tar);
        plain.push(`sha256:${await hashOf(tar)}`);
        await pipeline(createReadStream(tar), createGzip({ level: 9 }), createWriteStream(packed));
        const hex = await hashOf(packed);
        layers.push({ mediaType: MEDIA.layer, digest: `sha256:${hex}`, size: statSync(packed).size });
        renameSync(packed, path.join(blobs, hex));
      }
      const platform = { architecture: OCI_ARCHITECTURE[arch], os: 'linux' };
      const config = put(MEDIA.config, {
        ...platform,
        config: {
          User: `${NONROOT}:${NONROOT}`,
          Env: ['PATH=/usr/local/bin:/usr/bin'],
          Entrypoint: ['/usr/local/bin/simple-volume'],
          Labels: {
            'org.opencontainers.image.title': 'simple-volume',
            'org.opencontainers.image.version': version,
            'org.opencontainers.image.licenses': 'Apache-2.0',
          },
        },
        rootfs: { type: 'layers', diff_ids: plain },
      });
      const manifest = put(MEDIA.manifest, { schemaVersion: 2, mediaType: MEDIA.manifest, config, layers });
      manifests.push({ ...manifest, platform });
      const compressedBytes = layers.reduce((sum, one) => sum + one.size, config.size);
      built.push({ arch, compressedBytes, digest: manifest.digest });
      rmSync(path.join(scratch, arch), { recursive: true });
    }
    const index = put(MEDIA.index, { schemaVersion: 2, mediaType: MEDIA.index, manifests });
    const annotations = {
      'io.containerd.image.name': tag,
      'org.opencontainers.image.ref.name': tag.slice(tag.lastIndexOf(':') + 1),
    };
    writeFileSync(
      path.join(layout, 'index.json'),
      JSON.stringify({ schemaVersion: 2, mediaType: MEDIA.index, manifests: [{ ...index, annotations }] }),
    );
    writeFileSync(path.join(layout, 'oci-layout'), JSON.stringify({ imageLayoutVersion: '1.0.0' }));
    const whole = path.join(scratch, 'image.tar');
    pack(layout, whole);
    mkdirSync(path.dirname(out), { recursive: true });
    execFileSync('mv', ['--', whole, out]); // also to another file system
    return built;
  } finally {
    rmSync(scratch, { recursive: true, force: true });
  }
}

if (import.meta.main) {
  const { values } = parseArgs({
    options: { arch: { type: 'string' }, out: { type: 'string' }, tag: { type: 'string' } },
  });
  const wanted = (values.arch ?? process.arch).split(',');
  const architectures = ARCHITECTURES.filter((one) => wanted.includes(one));
  if (architectures.length !== wanted.length || !values.out || !values.tag?.includes(':')) {
    console.error('usage: npm run image -- --out FILE --tag NAME:TAG [--arch x64,arm64]');
    process.exit(2);
  }
  const built = await buildImage(architectures, path.resolve(values.out), values.tag, (line) =>
    console.error(`image: ${line}`),
  );
  for (const one of built)
    console.log(`${one.arch}: ${(one.compressedBytes / 1e6).toFixed(1)} MB compressed, ${one.digest}`);
}
