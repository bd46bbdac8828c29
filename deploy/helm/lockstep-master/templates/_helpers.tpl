{{- define "master.name" -}}
lockstep-master-{{ required "job: whose master this is" .Values.job }}
{{- end }}

{{- define "master.selector" -}}
app.kubernetes.io/name: lockstep-master
app.kubernetes.io/component: master
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "master.labels" -}}
{{ include "master.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version | replace "+" "_" }}
{{- end }}
