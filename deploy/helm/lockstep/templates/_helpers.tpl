{{- define "lockstep.labels" -}}
app.kubernetes.io/name: lockstep
app.kubernetes.io/component: {{ .component }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ .root.Chart.Name }}-{{ .root.Chart.Version | replace "+" "_" }}
{{- end }}

{{- define "lockstep.selector" -}}
app.kubernetes.io/name: lockstep
app.kubernetes.io/component: {{ .component }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
{{- end }}

{{- define "lockstep.image" -}}
{{- $i := .root.Values.image -}}
{{- $tag := printf "%s%s" ($i.tag | default .root.Chart.AppVersion | replace "+" "-") (.gpu | ternary "-gpu" "") -}}
{{- $digest := .gpu | ternary .root.Values.agent.gpu.digest $i.digest -}}
{{ $i.repository }}:{{ $tag }}{{ with $digest }}@{{ . }}{{ end }}
{{- end }}

{{- /* Where masters listen, as arguments; none where nobody has certificates. */ -}}
{{- define "lockstep.masters" -}}
{{- if ne .Values.tls.mode "off" }}
{{- range .Values.masters | default (list (printf "lockstep-master-{job}.%s:9401" (first .Values.namespaces))) }}
- --master={{ . }}
{{- end }}
{{- end }}
{{- end }}

{{- define "lockstep.restricted" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: {{ . }}
capabilities: {drop: [ALL]}
{{- end }}

{{- /* What runs as nobody, with the image's user's number. */ -}}
{{- define "lockstep.nobody" -}}
runAsNonRoot: true
runAsUser: 65532
runAsGroup: 65532
fsGroup: 65532
fsGroupChangePolicy: OnRootMismatch
seccompProfile: {type: RuntimeDefault}
{{- end }}

{{- define "lockstep.certificate" -}}
apiVersion: cert-manager.io/v1
kind: Certificate
metadata:
  name: {{ .name }}
  namespace: {{ .root.Release.Namespace }}
  labels:
    {{- include "lockstep.labels" . | nindent 4 }}
spec:
  secretName: {{ .name }}
  duration: {{ .root.Values.tls.certManager.duration }}
  renewBefore: {{ .root.Values.tls.certManager.renewBefore }}
  privateKey: {algorithm: ECDSA, size: 256, rotationPolicy: Always}
  usages: [digital signature, server auth, client auth]
  uris: ["spiffe://{{ .root.Values.tls.certManager.domain }}/lockstep/{{ .path }}"]
  {{- with .hosts }}
  dnsNames: {{ toJson . }}
  {{- end }}
  issuerRef:
    name: {{ required "tls.certManager.issuer.name: which issuer, when tls.mode is certManager" .root.Values.tls.certManager.issuer.name }}
    kind: {{ .root.Values.tls.certManager.issuer.kind }}
    group: cert-manager.io
{{- end }}

{{- /* A component's own volume of keys, but for agents, and its arguments. */ -}}
{{- define "lockstep.pki.volume" -}}
- name: pki
  secret:
    secretName: {{ eq .root.Values.tls.mode "certManager" | ternary (printf "lockstep-%s-tls" .component) (index .root.Values.tls .component).secretName }}
    defaultMode: 0440
{{- end }}

{{- define "lockstep.pki.args" -}}
{{- $name := eq .root.Values.tls.mode "certManager" | ternary "tls" .component }}
- --tls.cert=/pki/{{ $name }}.crt
- --tls.key=/pki/{{ $name }}.key
- --tls.ca=/pki/ca.crt
{{- end }}
