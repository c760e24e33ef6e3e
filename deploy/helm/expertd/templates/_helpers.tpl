{{- define "expertd.name" -}}
{{- $given := .Release.Name }}
{{- ternary $given (printf "%s-%s" $given .Chart.Name) (contains .Chart.Name $given) | trunc 52 | trimSuffix "-" }}
{{- end }}

{{- /* The Service with the addresses of all servers. */ -}}
{{- define "expertd.headless" -}}
{{ include "expertd.name" . }}-headless
{{- end }}

{{- /* The set of pods. A LeaderWorkerSet makes a Service of its own name, and would take the one of callers for it. */ -}}
{{- define "expertd.workload" -}}
{{- if gt (int .Values.nodes) 1 }}
{{- include "expertd.name" . | trunc 40 | trimSuffix "-" }}-nodes
{{- else }}
{{- include "expertd.name" . }}
{{- end }}
{{- end }}

{{- define "expertd.selector" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "expertd.labels" -}}
{{ include "expertd.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end }}

{{- /* Apart from those of the other Service, so that a monitor finds one of them. */ -}}
{{- define "expertd.headlessSelector" -}}
{{ include "expertd.selector" . }}
app.kubernetes.io/component: pool
{{- end }}

{{- /* The pods with the port: of several nodes, the first. */ -}}
{{- define "expertd.frontSelector" -}}
{{ include "expertd.selector" . }}
{{- if gt (int .Values.nodes) 1 }}
leaderworkerset.sigs.k8s.io/worker-index: "0"
{{- end }}
{{- end }}

{{- /* Seconds between SIGTERM and SIGKILL: all that the server may take, and 15 to end its processes. There is no preStop:
the server itself accepts requests for a while after SIGTERM, and is not ready from then on. */ -}}
{{- define "expertd.graceSeconds" -}}
{{ addf .Values.settings.shutdown_delay_seconds .Values.settings.drain_timeout_seconds 15 | ceil | int }}
{{- end }}

{{- define "expertd.scheme" -}}
{{ if .Values.tls.secretName }}https{{ else }}http{{ end }}
{{- end }}

{{- /* What the schema cannot say. */ -}}
{{- define "expertd.checks" -}}
{{- if not (or .Values.keys.secretName .Values.insecure) }}
{{- fail "keys.secretName: expected the name of a Secret with API keys, or insecure: true; got neither" }}
{{- end }}
{{- if and .Values.keys.secretName .Values.insecure }}
{{- fail "insecure: expected false with keys.secretName; got true" }}
{{- end }}
{{- if and (gt (int .Values.nodes) 1) (not (or .Values.settings.devices (gt (int .Values.settings.ranks) 1))) }}
{{- fail (printf "settings.devices: expected the GPUs of each node, such as 0-7, or settings.ranks, with nodes: %d; got neither" (int .Values.nodes)) }}
{{- end }}
{{- end }}

{{- /* "true" if there are channels over NIXL, or else nothing. */}}
{{- define "expertd.nixl" -}}
{{- if (.Values.settings.channels | default dict).nixl }}true{{ end }}
{{- end }}

{{- define "expertd.pod" -}}
{{- $front := .front }}
{{- with .root }}
metadata:
  labels: {{- include "expertd.labels" . | nindent 4 }}
  annotations:
    # Pods are replaced when the settings change.
    checksum/settings: {{ toYaml .Values.settings | sha256sum }}
    {{- with .Values.podAnnotations }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
spec:
  serviceAccountName: {{ .Values.serviceAccount.name | default (include "expertd.name" .) }}
  automountServiceAccountToken: false
  enableServiceLinks: false  # its variables begin with EXPERTD_, as settings do
  terminationGracePeriodSeconds: {{ include "expertd.graceSeconds" . }}
  securityContext: {{- toYaml .Values.podSecurityContext | nindent 4 }}
  {{- with .Values.imagePullSecrets }}
  imagePullSecrets: {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .Values.runtimeClassName }}
  runtimeClassName: {{ . }}
  {{- end }}
  {{- with .Values.nodeSelector }}
  nodeSelector: {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .Values.tolerations }}
  tolerations: {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .Values.affinity }}
  affinity: {{- toYaml . | nindent 4 }}
  {{- end }}
  containers:
    - name: expertd
      image: {{ printf "%s:%s" .Values.image.repository .Values.image.tag | quote }}
      imagePullPolicy: {{ .Values.image.pullPolicy }}
      {{- if gt (int .Values.nodes) 1 }}
      args:
        - serve
        - --nnodes=$(LWS_GROUP_SIZE)
        - --node-rank=$(LWS_WORKER_INDEX)
        - --rendezvous=$(LWS_LEADER_ADDRESS):{{ .Values.rendezvousPort }}
      {{- end }}
      env:
        - {name: EXPERTD_CONFIG, value: /etc/expertd/settings/config.yaml}
        {{- if .Values.keys.secretName }}
        - {name: EXPERTD_KEYS, value: /etc/expertd/keys/keys.yaml}
        {{- else }}
        - {name: EXPERTD_INSECURE, value: "true"}
        {{- end }}
        {{- if .Values.tls.secretName }}
        - {name: EXPERTD_TLS__CERTIFICATE, value: /etc/expertd/tls/tls.crt}
        - {name: EXPERTD_TLS__KEY, value: /etc/expertd/tls/tls.key}
        {{- end }}
        {{- if include "expertd.nixl" . }}
        - {name: UCX_TCP_PORT_RANGE, value: {{ printf "%d-%d" (int .Values.nixl.ports.first) (int .Values.nixl.ports.last) }}}
        {{- end }}
        {{- with .Values.env }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
      {{- if $front }}
      ports:
        - {name: http, containerPort: 8000}
      startupProbe:
        httpGet: {path: /v2/health/live, port: http, scheme: {{ include "expertd.scheme" . | upper }}}
        periodSeconds: 1
        timeoutSeconds: {{ .Values.probes.timeoutSeconds }}
        failureThreshold: {{ .Values.probes.startupSeconds }}
      readinessProbe:
        httpGet: {path: /v2/health/ready, port: http, scheme: {{ include "expertd.scheme" . | upper }}}
        periodSeconds: {{ .Values.probes.periodSeconds }}
        timeoutSeconds: {{ .Values.probes.timeoutSeconds }}
        failureThreshold: 2
      livenessProbe:
        httpGet: {path: /v2/health/live, port: http, scheme: {{ include "expertd.scheme" . | upper }}}
        periodSeconds: {{ .Values.probes.periodSeconds }}
        timeoutSeconds: {{ .Values.probes.timeoutSeconds }}
        failureThreshold: {{ divf .Values.probes.livenessSeconds .Values.probes.periodSeconds | ceil | int }}
      {{- end }}
      securityContext:
        readOnlyRootFilesystem: true
        allowPrivilegeEscalation: false
        capabilities: {drop: [ALL]}
      resources:
        {{- $resources := deepCopy .Values.resources }}
        {{- if .Values.gpus }}
        {{- $resources = merge $resources (dict "limits" (dict .Values.gpuResource .Values.gpus)) }}
        {{- end }}
        {{- if and (include "expertd.nixl" .) .Values.nixl.resource }}
        {{- $resources = merge $resources (dict "limits" (dict .Values.nixl.resource 1)) }}
        {{- end }}
        {{- toYaml $resources | nindent 8 }}
      volumeMounts:
        - {name: settings, mountPath: /etc/expertd/settings, readOnly: true}
        - {name: cache, mountPath: /var/cache/expertd}
        - {name: shared-memory, mountPath: /dev/shm}
        {{- if .Values.keys.secretName }}
        - {name: keys, mountPath: /etc/expertd/keys, readOnly: true}
        {{- end }}
        {{- if .Values.tls.secretName }}
        - {name: tls, mountPath: /etc/expertd/tls, readOnly: true}
        {{- end }}
        {{- if .Values.models.volume }}
        - {name: models, mountPath: /models, readOnly: true}
        {{- end }}
  volumes:
    - name: settings
      configMap: {name: {{ include "expertd.name" . }}}
    - name: cache
      {{- toYaml .Values.cache.volume | nindent 6 }}
    - name: shared-memory
      emptyDir: {medium: Memory, sizeLimit: {{ .Values.sharedMemory.sizeLimit }}}
    {{- if .Values.keys.secretName }}
    - name: keys
      secret: {secretName: {{ .Values.keys.secretName }}}
    {{- end }}
    {{- if .Values.tls.secretName }}
    - name: tls
      secret: {secretName: {{ .Values.tls.secretName }}}
    {{- end }}
    {{- with .Values.models.volume }}
    - name: models
      {{- toYaml . | nindent 6 }}
    {{- end }}
{{- end }}
{{- end }}
