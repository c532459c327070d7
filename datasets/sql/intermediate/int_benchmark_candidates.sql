-- int_benchmark_candidates: distinct questions offered for a benchmark, in the order in which they are taken.
-- A question offered twice stays once: in the first benchmark by name, from its first source.
-- Grain: one row per problem_id.
--   benchmark  varchar  the benchmark it may enter
--   position   bigint   1 for the first to be taken; families take turns, so that they enter in equal parts
--   others     as in stg_problems
with offered as (
    select
        stg_problems.*,
        row_number() over (partition by problem_id order by benchmark, pool_order, row_number) as copy
    from stg_problems
    where benchmark is not null
),

turns as (
    select
        offered.* exclude (copy),
        sha256(concat_ws(' ', settings.seed, 'benchmark', offered.problem_id)) as draw,
        row_number() over (partition by offered.benchmark, offered.family order by draw) as turn
    from offered
    cross join settings
    where offered.copy = 1
),

final as (
    select
        * exclude (draw, turn),
        row_number() over (partition by benchmark order by turn, draw) as position
    from turns
)

select * from final
