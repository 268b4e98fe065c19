{{/* The conductor's pods: in a StatefulSet, or in a LeaderWorkerSet with workers that join by hand. */}}

{{/* The flag that names the model and, for a model of the hub, environment variables. */}}
{{- define "tutti.modelFlags" -}}
{{- $uri := .Values.model.uri -}}
{{- if hasPrefix "hf://" $uri }}
- --model={{ trimPrefix "hf://" $uri }}
{{- else if hasPrefix "pvc://" $uri }}
{{- $path := trimPrefix "pvc://" $uri | splitn "/" 2 }}
- --model=/models/{{ default "" $path._1 }}
{{- else if hasPrefix "init://" $uri }}
- --model=/models/{{ trimPrefix "init://" $uri }}
{{- end }}
{{- with .Values.model.servedName }}
- --served-model-name={{ . }}
{{- end }}
{{- end -}}

{{- define "tutti.modelEnv" -}}
{{- if hasPrefix "hf://" .Values.model.uri }}
- { name: HF_HOME, value: /home/tutti/huggingface }
{{- with .Values.model.hf.endpoint }}
- { name: HF_ENDPOINT, value: {{ . | quote }} }
{{- end }}
{{- with .Values.model.hf.tokenSecret }}
{{- if .name }}
- name: HF_TOKEN
  valueFrom: { secretKeyRef: { name: {{ .name }}, key: {{ .key }} } }
{{- end }}
{{- end }}
{{- end }}
{{- end -}}

{{- define "tutti.modelMounts" -}}
{{- if or (hasPrefix "pvc://" .Values.model.uri) (hasPrefix "init://" .Values.model.uri) }}
- { name: models, mountPath: /models, readOnly: true }
{{- end }}
{{- if and (hasPrefix "hf://" .Values.model.uri) .Values.model.hf.cacheClaim }}
- { name: hub, mountPath: /home/tutti/huggingface }
{{- end }}
{{- end -}}

{{- define "tutti.modelVolumes" -}}
{{- $uri := .Values.model.uri -}}
{{- if hasPrefix "pvc://" $uri }}
- name: models
  persistentVolumeClaim: { claimName: {{ (trimPrefix "pvc://" $uri | splitn "/" 2)._0 }}, readOnly: true }
{{- else if hasPrefix "init://" $uri }}
- name: models
  emptyDir: { sizeLimit: {{ .Values.model.init.size }} }
{{- end }}
- name: home
  emptyDir: { {{- if and (hasPrefix "hf://" $uri) (not .Values.model.hf.cacheClaim) }}sizeLimit: {{ .Values.model.hf.cacheSize }}{{ end -}} }
{{- if and (hasPrefix "hf://" $uri) .Values.model.hf.cacheClaim }}
- name: hub
  persistentVolumeClaim: { claimName: {{ .Values.model.hf.cacheClaim }} }
{{- end }}
{{- end -}}

{{- define "tutti.modelInit" -}}
{{- if hasPrefix "init://" .Values.model.uri }}
{{- $init := .Values.model.init }}
initContainers:
  - name: model
    image: {{ required "model.init.image: is required where model.uri is init://" $init.image }}
    {{- with $init.command }}
    command: {{ toJson . }}
    {{- end }}
    {{- with $init.args }}
    args: {{ toJson . }}
    {{- end }}
    {{- with $init.env }}
    env: {{ toJson . }}
    {{- end }}
    securityContext: {{- include "tutti.containerSecurity" . | nindent 6 }}
    volumeMounts:
      - { name: models, mountPath: /models }
      - { name: tmp, mountPath: /tmp }
{{- end }}
{{- end -}}

{{/* The topology file; empty if the values `workers` and `tp` describe the topology. */}}
{{- define "tutti.topology" -}}
{{- $c := .Values.conductor -}}
{{- $spans := include "tutti.spans" . -}}
{{- $encodes := false -}}
{{- range $c.roles }}{{ if eq .role "encode" }}{{ $encodes = true }}{{ end }}{{ end -}}
{{- $groups := list -}}
{{- $ranks := 0 -}}
{{- range $c.roles -}}
{{- $group := dict "name" .name "replicas" (int (default 1 .replicas)) "tp" (int (default 1 .tp)) -}}
{{- $ranks = add $ranks (mul (int (default 1 .replicas)) (int (default 1 .tp))) -}}
{{- if eq .role "encode" }}{{ $_ := set $group "nodes" $c.modelParts.encoders }}{{ end -}}
{{- if and $encodes (ne .role "encode") }}{{ $_ := set $group "nodes" $c.modelParts.text }}{{ end -}}
{{- if eq .role "prefill" }}{{ $_ := set $group "walks" $c.modelParts.prefill }}{{ end -}}
{{- if eq .role "decode" }}{{ $_ := set $group "walks" $c.modelParts.decode }}{{ end -}}
{{- with .device }}{{ $_ := set $group "device" . }}{{ end -}}
{{- if $spans }}{{ $_ := set $group "spawn" false }}{{ end -}}
{{- $groups = append $groups $group -}}
{{- end -}}
{{- if $spans -}}
{{- $all := mul (int $c.podsPerReplica) (int $c.workersPerPod) -}}
{{- if not $groups -}}
{{- if mod $all (int $c.tp) }}{{ fail (printf "conductor.tp: is %d, which does not divide podsPerReplica times workersPerPod, %d" (int $c.tp) $all) }}{{ end -}}
{{- $groups = list (dict "name" "all" "replicas" (div $all (int $c.tp)) "tp" (int $c.tp) "spawn" false) -}}
{{- else if ne (int $ranks) (int $all) -}}
{{- fail (printf "conductor.roles: need %d workers, but podsPerReplica times workersPerPod is %d" (int $ranks) (int $all)) -}}
{{- end -}}
{{- end -}}
{{- if $groups }}{{ toYaml (dict "group" $groups) }}{{ end -}}
{{- end -}}

{{- define "tutti.conductorFlags" -}}
{{- $c := .Values.conductor -}}
- --config=/etc/tutti/config/settings.yaml
- --http=0.0.0.0:{{ int .Values.ports.http }}
- --grpc=0.0.0.0:{{ int .Values.ports.grpc }}
- --operations=0.0.0.0:{{ int .Values.ports.operations }}
- --device={{ include "tutti.device" . }}
{{- if include "tutti.topology" . }}
- --topology=/etc/tutti/config/topology.yaml
{{- else }}
- --workers={{ int $c.workers }}
- --tp={{ int $c.tp }}
{{- end }}
- --drain-timeout={{ int $c.drain.timeoutSeconds }}
- --lame-duck={{ int $c.drain.lameDuckSeconds }}
{{- include "tutti.modelFlags" . }}
{{- if .Values.router.enabled }}
- --no-router
- --cluster-grpc=0.0.0.0:{{ int .Values.ports.cluster }}
- --cluster-token-file=/etc/tutti/cluster/token
{{- else }}
{{- include "tutti.frontFlags" . }}
{{- end }}
{{- if include "tutti.spans" . }}
- --worker-listen=0.0.0.0:{{ int .Values.ports.workers }}
- --join-token-file=/etc/tutti/cluster/token
{{- end }}
{{- include "tutti.clusterTlsFlags" . }}
{{- end -}}

{{/* Resources of a container. Takes (dict root gpus), where gpus is the container's number of GPUs. */}}
{{- define "tutti.resources" -}}
{{- $c := .root.Values.conductor -}}
{{- $requests := deepCopy (default dict $c.resources.requests) -}}
{{- $limits := deepCopy (default dict $c.resources.limits) -}}
{{- if .gpus }}{{ $_ := set $limits $c.gpuResource .gpus }}{{ $_ := set $requests $c.gpuResource .gpus }}{{ end -}}
{{- if $c.hugepages.size -}}
{{- $name := printf "hugepages-%s" $c.hugepages.size -}}
{{- $limit := required "conductor.hugepages.limit: is required with conductor.hugepages.size" $c.hugepages.limit -}}
{{- $_ := set $limits $name $limit }}{{ $_ := set $requests $name $limit }}
{{- end -}}
{{- toYaml (dict "requests" $requests "limits" $limits) -}}
{{- end -}}

{{- define "tutti.workingMounts" -}}
- { name: shm, mountPath: /dev/shm }
{{- if .Values.conductor.hugepages.size }}
- { name: hugepages, mountPath: /hugepages }
{{- end }}
{{- include "tutti.modelMounts" . }}
{{- end -}}

{{/* The container of a worker that joins by hand; index is its index in the pod. Takes (dict root index gpus). */}}
{{- define "tutti.joiningWorker" -}}
{{- $root := .root -}}
- name: worker-{{ .index }}
  image: {{ include "tutti.conductorImage" $root }}
  imagePullPolicy: {{ $root.Values.images.pullPolicy }}
  # The pod's index within its replica is a variable, so a shell computes the rank.
  command:
    - /bin/sh
    - -c
    - exec worker --rank=$((LWS_WORKER_INDEX * {{ int $root.Values.conductor.workersPerPod }} + {{ .index }})) "$@"
    - worker
  args:
    - --conductor={{ ternary "http" "https" (eq $root.Values.tls.cluster.mode "none") }}://$(LWS_LEADER_ADDRESS):{{ int $root.Values.ports.workers }}
    - --join-token-file=/etc/tutti/cluster/token
    {{- include "tutti.clusterTlsFlags" $root | indent 4 }}
  env:
    {{- include "tutti.homeEnv" $root | nindent 4 }}
    {{- include "tutti.modelEnv" $root | indent 4 }}
    {{- with $root.Values.conductor.extraEnv }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  securityContext: {{- include "tutti.containerSecurity" $root | nindent 4 }}
  resources: {{- include "tutti.resources" (dict "root" $root "gpus" .gpus) | nindent 4 }}
  volumeMounts:
    {{- include "tutti.mounts" (dict "root" $root "part" "conductor" "front" false) | nindent 4 }}
    {{- include "tutti.workingMounts" $root | nindent 4 }}
{{- end -}}

{{/* A pod. Takes (dict root leads joins). leads: it has the conductor. joins: number of workers that join by hand. */}}
{{- define "tutti.conductorPod" -}}
{{- $root := .root -}}
{{- $c := $root.Values.conductor -}}
{{- $front := not $root.Values.router.enabled -}}
{{- $joins := int .joins -}}
{{ include "tutti.podBasics" $root }}
{{- include "tutti.placement" $c }}
{{- with $c.runtimeClassName }}
runtimeClassName: {{ . }}
{{- end }}
terminationGracePeriodSeconds: {{ include "tutti.grace" $c.drain }}
{{- include "tutti.modelInit" $root }}
containers:
  {{- if .leads }}
  - name: conductor
    image: {{ include "tutti.conductorImage" $root }}
    imagePullPolicy: {{ $root.Values.images.pullPolicy }}
    command: [conductor]
    args:
      {{- include "tutti.conductorFlags" $root | nindent 6 }}
    env:
      {{- include "tutti.homeEnv" $root | nindent 6 }}
      {{- include "tutti.modelEnv" $root | indent 6 }}
      {{- with $c.extraEnv }}
      {{- toYaml . | nindent 6 }}
      {{- end }}
    ports:
      - { name: http, containerPort: {{ int $root.Values.ports.http }} }
      - { name: grpc, containerPort: {{ int $root.Values.ports.grpc }} }
      - { name: operations, containerPort: {{ int $root.Values.ports.operations }} }
      {{- if $root.Values.router.enabled }}
      - { name: cluster, containerPort: {{ int $root.Values.ports.cluster }} }
      {{- end }}
      {{- if $joins }}
      - { name: workers, containerPort: {{ int $root.Values.ports.workers }} }
      {{- end }}
    securityContext: {{- include "tutti.containerSecurity" $root | nindent 6 }}
    {{- if $joins }}
    resources:
      requests: { cpu: 500m, memory: 1Gi }
      limits: { memory: 4Gi }
    {{- else }}
    resources: {{- include "tutti.resources" (dict "root" $root "gpus" (int $c.gpus)) | nindent 6 }}
    {{- end }}
    {{- include "tutti.probes" $c.startupSeconds | nindent 4 }}
    {{- with int $c.drain.preStopSeconds }}
    lifecycle: { preStop: { sleep: { seconds: {{ . }} } } }
    {{- end }}
    volumeMounts:
      {{- include "tutti.mounts" (dict "root" $root "part" "conductor" "front" $front) | nindent 6 }}
      {{- include "tutti.workingMounts" $root | nindent 6 }}
  {{- end }}
  {{- range $index := until $joins }}
  {{- include "tutti.joiningWorker" (dict "root" $root "index" $index "gpus" (div (int $c.gpus) $joins)) | nindent 2 }}
  {{- end }}
volumes:
  {{- include "tutti.volumes" (dict "root" $root "part" "conductor" "front" $front) | nindent 2 }}
  - name: shm
    emptyDir: { medium: Memory, sizeLimit: {{ $c.sharedMemory }} }
  {{- with $c.hugepages.size }}
  - name: hugepages
    emptyDir: { medium: HugePages-{{ . }} }
  {{- end }}
  {{- include "tutti.modelVolumes" $root | nindent 2 }}
{{- end -}}
