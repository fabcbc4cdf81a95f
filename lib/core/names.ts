import { SimpleVolumeError } from './errors.ts';

/** DNS-1123 subdomain: what Kubernetes allows for a volume's (PV's or claim's) name; never '.', '..' or a dot file. */
const SUBDOMAIN = /^[a-z0-9](?:[a-z0-9-]*[a-z0-9])?(?:\.[a-z0-9](?:[a-z0-9-]*[a-z0-9])?)*$/;
const LABEL = /^[a-z0-9](?:[a-z0-9-]*[a-z0-9])?$/;

/** JSON schema patterns of the same rules, for the HTTP border. */
export const NAMESPACE_SCHEMA = {
  type: 'string',
  minLength: 1,
  maxLength: 63,
  pattern: LABEL.source,
} as const;
export const VOLUME_SCHEMA = {
  type: 'string',
  minLength: 1,
  maxLength: 253,
  pattern: SUBDOMAIN.source,
} as const;
export const NODE_SCHEMA = {
  type: 'string',
  minLength: 1,
  maxLength: 253,
  pattern: SUBDOMAIN.source,
} as const;

/**
 * A name that becomes a folder below the pool. Everything that is not a DNS name is refused, so that no name
 * can leave the pool or meet the pool's own folders (they start with a dot).
 * @throws FIELD_INVALID naming the field and what is allowed.
 */
export function checkName(value: string, field: string, kind: 'label' | 'subdomain' = 'subdomain'): string {
  const max = kind === 'label' ? 63 : 253;
  if (value.length === 0 || value.length > max || !(kind === 'label' ? LABEL : SUBDOMAIN).test(value))
    throw new SimpleVolumeError(
      'FIELD_INVALID',
      `${field} must be 1 to ${max} characters a-z, 0-9 and '-'${kind === 'label' ? '' : " or '.'"}, beginning and ending with a letter or digit; got ${JSON.stringify(value.slice(0, 80))}`,
      { field },
    );
  return value;
}
